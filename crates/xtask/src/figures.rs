//! Tables of figures in pages, made from `results/`: goals and commands from `goals.json`, figures from a file a run.
//!
//! A page has the place of a table between two marks: `<!-- figures: NAME -->` and `<!-- end of figures -->`. Of each
//! figure the newest run counts, which is the last file that has it. Files are named by date and commit; a later one of a
//! day has the hour, too (`T20`).

use crate::tools;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Pages with tables.
const PAGES: [&str; 2] = ["docs/performance.md", "docs/resilience.md"];

const BEGIN: &str = "<!-- figures: ";
const END: &str = "<!-- end of figures -->";

pub fn run(arguments: &[String]) -> Result<()> {
    if arguments != ["figures"] {
        bail!("`./x docs figures` writes the tables of figures into their pages, from results/");
    }
    for (page, text) in stale(tools::root())? {
        std::fs::write(tools::root().join(&page), text).with_context(|| format!("cannot write {}", page.display()))?;
        println!("{} is written anew", page.display());
    }
    Ok(())
}

/// Pages whose tables are not what `results/` gives, as they should be.
pub fn stale(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let results = Results::read(root)?;
    let mut pages = Vec::new();
    for page in PAGES.map(PathBuf::from) {
        let text = std::fs::read_to_string(root.join(&page)).with_context(|| format!("no {}", page.display()))?;
        let filled = results.fill(&text).with_context(|| page.display().to_string())?;
        if filled != text {
            pages.push((page, filled));
        }
    }
    Ok(pages)
}

/// All that was measured.
struct Results {
    goals: Value,
    /// Oldest first.
    runs: Vec<Value>,
}

impl Results {
    fn read(root: &Path) -> Result<Results> {
        let directory = root.join("results");
        let entries = std::fs::read_dir(&directory).context("cannot list results/")?;
        let mut names: Vec<PathBuf> = entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        names.sort();
        // Runs are named by their date; what stands beside them is not.
        let is_run = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("20"));
        names.retain(is_run);
        let runs = names.iter().map(|path| json(path)).collect::<Result<_>>()?;
        Ok(Results { goals: json(&directory.join("goals.json"))?, runs })
    }

    /// The page with its tables.
    fn fill(&self, page: &str) -> Result<String> {
        let mut text = String::new();
        let mut rest = page;
        while let Some(at) = rest.find(BEGIN) {
            let (before, after) = rest.split_at(at + BEGIN.len());
            let (name, after) = after.split_once(" -->").context("a mark has no end")?;
            let (_, after) = after.split_once(END).with_context(|| format!("figures {name} have no end"))?;
            text.push_str(&format!("{before}{name} -->\n\n{}\n{END}", self.table(name)?));
            rest = after;
        }
        Ok(text + rest)
    }

    fn table(&self, name: &str) -> Result<String> {
        let all = self.goals["figures"].as_array().context("goals.json has no figures")?;
        let mut text = String::from("| what | goal | newest | met | commit |\n| --- | --- | --- | --- | --- |\n");
        let rows = text.len();
        for goal in all.iter().filter(|goal| goal["table"] == name) {
            let id = field(goal, "id")?;
            let run = self.runs.iter().rev().find(|run| !run["figures"][id].is_null());
            let run = run.with_context(|| format!("no run has the figure {id}"))?;
            let figure = &run["figures"][id];
            let (what, wanted) = (field(goal, "what")?, field(goal, "goal")?);
            let (measured, met) = (field(figure, "measured")?, field(figure, "met")?);
            text.push_str(&format!("| {what} | {wanted} | {measured} | {met} | `{}` |\n", field(run, "commit")?));
        }
        if text.len() == rows {
            bail!("goals.json has no figures of {name}");
        }
        Ok(text)
    }
}

fn json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

fn field<'a>(value: &'a Value, name: &str) -> Result<&'a str> {
    value[name].as_str().with_context(|| format!("{value} has no {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn results() -> Results {
        let goal = json!({ "id": "a", "table": "t", "what": "speed", "goal": "2" });
        let run = |commit: &str, measured: &str| json!({ "commit": commit, "figures": { "a": { "measured": measured, "met": "yes" } } });
        Results { goals: json!({ "figures": [goal] }), runs: vec![run("1", "2.5"), run("2", "3.5")] }
    }

    #[test]
    fn the_newest_figure_is_shown_and_twice_is_as_once() {
        let page = format!("# Page\n\n{BEGIN}t -->\n{END}\n\nMore.\n");
        let filled = results().fill(&page).unwrap();
        assert!(filled.contains("\n| speed | 2 | 3.5 | yes | `2` |\n"), "{filled}");
        assert!(filled.starts_with("# Page\n") && filled.ends_with("\n\nMore.\n"));
        assert_eq!(results().fill(&filled).unwrap(), filled);
    }

    #[test]
    fn a_table_of_nothing_and_a_figure_of_no_run_are_refused() {
        assert!(results().fill(&format!("{BEGIN}u -->\n{END}")).is_err());
        assert!(results().fill(&format!("{BEGIN}t -->\n")).is_err());
        let empty = Results { runs: Vec::new(), ..results() };
        assert!(empty.fill(&format!("{BEGIN}t -->\n{END}")).is_err());
    }
}
