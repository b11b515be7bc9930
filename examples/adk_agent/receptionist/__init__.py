"""An agent that google-adk's commands can load.  It needs no network and no API key."""

from . import agent as agent
