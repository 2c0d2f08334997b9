"""The results store: what is measured, persisted case by case, with where it comes from."""

from repro.records.schema import HEAD, KINDS, SCHEMA, TAIL, Key, SchemaError, case_key, parameter_columns
from repro.records.store import Run, Store

__all__ = ["HEAD", "KINDS", "SCHEMA", "TAIL", "Key", "Run", "SchemaError", "Store", "case_key", "parameter_columns"]
