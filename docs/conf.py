"""Configuration of the documentation site. `make docs` builds it; `.readthedocs.yaml` does so on Read the Docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import mpidp

project = "mpidp"
author = "mpidp contributors"
project_copyright = author
version = release = mpidp.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "generated", "names"]
exclude_patterns = ["_ext", "_static"]
highlight_language = "text"
smartquotes = False  # else --option has a dash
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

nitpicky = True
# Types in signatures that belong to other packages (whose indexes would need a network) or are not public.
nitpick_ignore_regex = [("py:(class|exc)", r"(?!mpidp\.[A-Z]\w*$).*")]

html_theme = "furo"
html_title = f"mpidp {release}"
html_static_path = ["_static"]
html_css_files = ["mpidp.css"]
html_copy_source = False
