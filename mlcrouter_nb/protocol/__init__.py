"""What travels between programs: OpenAI and MicroServing types, server-sent events, errors."""
