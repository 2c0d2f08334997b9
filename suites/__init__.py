"""One module per group of claims; `repro.suite` says what a module here must define."""
