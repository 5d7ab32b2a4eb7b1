"""The management application: health, metrics, models, OpenAPI pages."""
