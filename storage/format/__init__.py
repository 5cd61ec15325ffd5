"""The bytes of the store, format version 3: records, extent headers and payloads."""
