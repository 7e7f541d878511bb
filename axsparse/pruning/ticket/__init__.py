"""Tickets: files of masks, with which a run may start under any layout."""
