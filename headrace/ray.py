"""The Ray Serve application, under the name that Ray's commands take: ``serve run headrace.ray:app model=NAME``. Stands
alone because the name is part of that command; options are those of `build_app`."""

from headrace.serving.ray.app import build_app as app

__all__ = ["app"]
