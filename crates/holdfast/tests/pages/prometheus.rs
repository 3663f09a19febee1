//! A real Prometheus, by a configuration of a page.

use crate::support::{needs, text, until};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Gone with this.
pub struct Prometheus {
    child: Child,
    at: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn list(of: &Value) -> impl Iterator<Item = &Value> {
    of.as_array().expect("a list").iter()
}

fn word(of: &Value) -> String {
    of.as_str().expect("text").to_string()
}

impl Prometheus {
    /// Keeps what it has in `dir`; it has read all rules when this returns.
    pub fn start(config: &Path, dir: &Path, listens: &str) -> Prometheus {
        let option = |name: &str, value: &str| format!("--{name}={value}");
        fs::create_dir(dir).unwrap();
        let log = fs::File::create(dir.join("log")).unwrap();
        let mut command = Command::new(needs("prometheus"));
        command.arg(option("config.file", config.to_str().unwrap()));
        command.arg(option("storage.tsdb.path", dir.join("data").to_str().unwrap()));
        command.arg(option("web.listen-address", listens)).stdin(Stdio::null());
        let child = command.current_dir(dir).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let prometheus = Prometheus { child, at: listens.to_string() };
        let log = dir.join("log");
        until(&format!("Prometheus answers: {}", log.display()), || {
            !prometheus.said("/-/ready", &[]).is_empty() && !prometheus.rules().is_empty()
        });
        prometheus
    }

    /// Nothing while it does not answer.
    fn said(&self, path: &str, more: &[&str]) -> String {
        let mut command = Command::new(needs("curl"));
        command.args(["-sS", "--max-time", "60", "-G"]).args(more).arg(format!("http://{}{path}", self.at));
        let output = command.output().unwrap();
        if output.status.success() { text(&output.stdout) } else { String::new() }
    }

    fn data(&self, path: &str, more: &[&str]) -> Value {
        let said = self.said(path, more);
        let json: Value = serde_json::from_str(&said).unwrap_or_default();
        assert!(
            json["status"] == "success" || said.is_empty() || said.contains("not ready"),
            "{path} {more:?}: {said}"
        );
        json["data"].clone()
    }

    /// Whether each target is `up`, or why not.
    pub fn targets(&self) -> Vec<String> {
        let state = |target: &Value| match word(&target["lastError"]) {
            none if none.is_empty() => word(&target["health"]),
            why => why,
        };
        list(&self.data("/api/v1/targets", &[])["activeTargets"]).map(state).collect()
    }

    /// `ok` of each rule that was looked at, or why it failed.
    pub fn rules(&self) -> Vec<String> {
        let data = self.data("/api/v1/rules", &[]);
        let groups = data["groups"].as_array().into_iter().flatten();
        let state = |rule: &Value| rule["lastError"].as_str().map_or_else(|| word(&rule["health"]), str::to_string);
        groups.flat_map(|group| list(&group["rules"])).map(state).collect()
    }

    /// Names of rules that something holds for: these are pending or firing.
    pub fn alerts(&self) -> Vec<String> {
        let data = self.data("/api/v1/alerts", &[]);
        list(&data["alerts"]).map(|alert| word(&alert["labels"]["alertname"])).collect()
    }

    /// Series that it finds now; it has to make sense.
    pub fn query(&self, query: &str) -> Vec<Value> {
        let data = self.data("/api/v1/query", &["--data-urlencode", &format!("query={query}")]);
        list(&data["result"]).cloned().collect()
    }
}

/// What the board asks for, of the page's job.
pub fn queries_of_the_board(integrations: &str) -> Vec<String> {
    let board = fs::read_to_string(Path::new(integrations).join("grafana/holdfast.json")).unwrap();
    let board: Value = serde_json::from_str(&board).unwrap();
    let targets = list(&board["panels"]).filter_map(|panel| panel["targets"].as_array()).flatten();
    let of_here = [("$job", "holdfast"), ("$instance", ".*"), ("$volume", ".*"), ("$__rate_interval", "1m")];
    let filled =
        |target: &Value| of_here.iter().fold(word(&target["expr"]), |expr, (name, value)| expr.replace(name, value));
    targets.map(filled).collect()
}
