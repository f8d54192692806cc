"""Where both frameworks meet: the instruments that hold them equal, the golden arrays, and the suite."""
