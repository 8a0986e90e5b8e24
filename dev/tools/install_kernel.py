"""Register the Jupyter kernel "grpo-course", and how JupyterLab opens the course, in the environment that runs this.

`make lab`, JupyterLab on a VM, and JupyterHub's image all start from such an environment, so all of them agree.
Nothing is written to the home folder.  An option on JupyterLab's command line still comes before what is set here.
"""

import sys
from pathlib import Path

from grpo_lib.common import environment, files

environment.prepare()  # before IPython is imported, which makes a folder for its history

from ipykernel.kernelspec import install  # noqa: E402

FIRST_PAGE = "/lab/tree/notebooks/00_setup.ipynb"
# It asks at the first start whether to fetch news of the Jupyter project, and then does so from another server.
NEWS = "@jupyterlab/apputils-extension:announcements"


def install_kernel() -> str:
    """Write the kernel's specification and return its folder."""
    return install(
        prefix=sys.prefix,
        kernel_name=environment.KERNEL_NAME,
        display_name="GRPO course",
        # JAX_PLATFORMS is not among the variables: on a TPU VM the same kernel must find the TPU.
        env=environment.default_variables(),
    )


def configure_jupyterlab() -> None:
    """Show the repository, so that pictures, docs/ and exercises/ are found, and begin with notebook 00."""
    folder = Path(sys.prefix) / "etc" / "jupyter"
    server = {
        "ServerApp": {"root_dir": str(environment.repo_root()), "default_url": FIRST_PAGE},
        "LabApp": {"default_url": FIRST_PAGE},  # JupyterLab has one of its own, /lab
    }
    files.write_json_atomic(folder / "jupyter_server_config.json", server)
    files.write_json_atomic(folder / "labconfig" / "page_config.json", {"disabledExtensions": {NEWS: True}})


print(install_kernel())
configure_jupyterlab()
