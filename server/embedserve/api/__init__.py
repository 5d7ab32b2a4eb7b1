"""The management application: all routes without a lookup, the console and the OpenAPI pages."""
