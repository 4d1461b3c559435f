"""One run: its rounds, its folder and what lies in it, and how it goes on after whatever ended it."""
