"""What cells show: the status, a boot's progress, an answer that streams; as HTML and as text."""
