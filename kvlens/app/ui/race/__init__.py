"""The New run page: races and single runs that go on."""
