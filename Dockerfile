# One image for every role of a run: `hephaestus`, by a user without rights.
#
#   docker build -t hephaestus:0.2.0 .
#   docker build -t hephaestus:0.2.0 --build-arg EXTRAS='cuda envs' .     extras of pyproject.toml
#
# Environments of your own go into /work of an image that is made FROM this one.

FROM python:3.10.19-slim-bookworm AS build
ARG EXTRAS=''
ENV UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PROJECT_ENVIRONMENT=/opt/hephaestus \
    UV_PYTHON_DOWNLOADS=never
WORKDIR /build
RUN pip install --no-cache-dir uv==0.13.9
COPY pyproject.toml uv.lock LICENSE README.md ./
# The packages first: they change less often than the code. Each extra is a word of its own.
# hadolint ignore=SC2046
RUN uv sync --frozen --no-install-project --extra distributed $(for extra in $EXTRAS; do echo "--extra $extra"; done)
COPY __init__.py py.typed ./
COPY agents agents
COPY learner learner
COPY actors actors
COPY replay replay
COPY launch launch
# hadolint ignore=SC2046
RUN uv sync --frozen --no-editable --extra distributed $(for extra in $EXTRAS; do echo "--extra $extra"; done)

FROM python:3.10.19-slim-bookworm
RUN groupadd --gid 10001 hephaestus \
    && useradd --uid 10001 --gid 10001 --create-home hephaestus \
    && pip uninstall --yes --root-user-action=ignore setuptools wheel pip
COPY --from=build /opt/hephaestus /opt/hephaestus
ENV PATH=/opt/hephaestus/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /work
USER 10001:10001
ENTRYPOINT ["hephaestus"]
