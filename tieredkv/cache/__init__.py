"""The tiered cache: what is where, what moves, what stays.

`tiered.TieredCache` is the engine's one door; `promotion` brings blocks up, `demotion` takes them
down, `directory` remembers what they are and until when. None of it knows models or requests.
"""
