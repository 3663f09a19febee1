//! `./x dashboard`: the dashboard in a real browser, before a real grid.

use crate::tools;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

const WANTED: [&str; 2] = ["playwright==1.65.2", "axe-playwright-python==0.1.8"];

pub fn run(arguments: &[String]) -> Result<()> {
    let root = tools::root();
    let pictures = match arguments {
        [only] if only == "--cost" => return cost(),
        [] => None,
        [only] if only == "--pictures" => Some(root.join("docs/pictures")),
        _ => bail!("`./x dashboard` takes --pictures or --cost"),
    };
    let Some(browser) = browser() else {
        bail!("there is no chromium here; on Debian `./x setup --dashboard` installs it");
    };
    let python = tools::python("dashboard", &WANTED)?;
    tools::build_checked(&["holdfast"])?;
    let mut command = Command::new(python);
    command.arg(root.join("crates/xtask/dashboard/test.py"));
    command.arg(tools::checked_program("holdfast")).arg(work(&tools::target_dir()));
    command.arg(browser).args(pictures);
    match command.status().context("cannot start Python")?.success() {
        true => Ok(()),
        false => bail!(
            "the dashboard is not as it is to be; logs of its grid are in {}",
            work(&tools::target_dir()).display()
        ),
    }
}

/// What one that stays open costs its host, of the program as users get it.
fn cost() -> Result<()> {
    let program = tools::build_release()?;
    let script = tools::root().join("crates/xtask/dashboard/cost.py");
    tools::run(Command::new("python3").arg(script).arg(program).arg(work(&tools::target_dir())))
}

pub fn browser() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let all = std::env::split_paths(&paths).flat_map(|dir| ["chromium", "chromium-browser"].map(|name| dir.join(name)));
    all.into_iter().find(|path| path.exists())
}

fn work(target: &Path) -> PathBuf {
    target.join("dashboard")
}
