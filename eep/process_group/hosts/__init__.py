"""Process groups over several hosts without a supervisor: the ranks find each other through the store of torch.

``host`` what a caller says of its host · ``sealed_store`` the store, with every wait bounded and every record sealed ·
``store_views`` views that are committed there · ``host_roster`` which ranks there are, and where.
"""
