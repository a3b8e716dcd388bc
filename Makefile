# make run: the page on port 7860.  make test: every check and every test.
# Needs Python 3.11 or newer, make and a package registry; everything else goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test format browser clean

run: .venv/run
	$(BIN)/python app.py $(ARGUMENTS)

test: .venv/test browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGUMENTS)

format: .venv/test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/run: requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Carpool needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing what the application needs. The first time takes minutes."
	$(PIP) --requirement requirements.txt
	@touch $@

.venv/test: .venv/run pyproject.toml
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["test"], sep="\n")' > .venv/test.txt
	$(PIP) --requirement .venv/test.txt
	@touch $@

# Chromium for the browser tests: there already, or from Debian where this user may install.
browser:
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -qq --yes chromium; then :; \
	else echo "No Chromium, and it cannot be installed here: the browser tests will be skipped."; fi

clean:
	rm -rf .venv build
