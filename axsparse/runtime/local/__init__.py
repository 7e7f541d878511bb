"""The transport between ranks that are threads of one process and take turns."""
