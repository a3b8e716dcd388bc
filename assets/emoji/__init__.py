"""How the small text-to-emoji model beside this file was made, and how good it is.

Nothing of the application imports this: it needs the weights only. The card is `README.md`.
"""
