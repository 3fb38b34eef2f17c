"""A server of the Model Context Protocol over standard input and output, with one tool."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()
def get_weather(city: str) -> str:
    """What the weather is like."""
    return f"{city}: fine"


server.run("stdio")
