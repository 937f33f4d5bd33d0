"""Requests to engines: policies, endpoints that exist, and the OpenAI gateway."""
