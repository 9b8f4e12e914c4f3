"""``python -m kombu_fdb.options``: the README's table of options."""

from kombu_fdb.options.settings import options_table

if __name__ == "__main__":
    print(options_table(), end="")  # noqa: T201
