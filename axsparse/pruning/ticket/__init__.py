"""Tickets: masks as files, which start a run under any layout."""
