"""Drills against a running server: load whose every token is checked, faults on purpose, and the story of both.

``mixed_drill`` is a whole drill, ``cases`` the plans of those that once found something · ``request_mix`` what clients ask
for, ``query_answers`` what came back, ``references`` the fault-free answers, ``token_certainty`` which of them can be
compared · ``load`` and ``mixed_load`` the clients · ``faults`` kills and worse, ``random_faults`` the same at random ·
``story`` what came of it, ``step_search`` the steps of wrong tokens · ``sglang_server`` starts a real server on a device
(``devices``, ``mps``) with a random model (``models``).
"""
