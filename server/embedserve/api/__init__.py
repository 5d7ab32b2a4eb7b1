"""The management application: health, metrics, models and the OpenAPI pages."""
