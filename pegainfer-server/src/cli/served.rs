//! `pegainfer models served`: the models of a running server, and their states.

use crate::http::Secret;
use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::DecimalBytes;
use pegainfer_terminal::printable::one_line;
use pegainfer_terminal::stdout::print;
use serde::Deserialize;
use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use ureq::Agent;

/// Maximum time for the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Flags of `models served`.
#[derive(Debug, Clone, Args)]
pub struct ServedArgs {
    /// Address of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Key of the server, if it needs one; the variable PEGAINFER_API_KEY is safer
    #[arg(long, value_name = "KEY", value_parser = clap::value_parser!(Secret))]
    pub api_key: Option<Secret>,
}

/// The answer of `/v1/models`.
#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    parent: Option<String>,
    state: String,
    error: Option<String>,
    pinned: bool,
    memory_bytes: u64,
    last_used: Option<u64>,
}

/// Runs the command.
pub fn run(args: &ServedArgs) -> Result<()> {
    let url = format!("{}/v1/models", args.url.trim_end_matches('/'));
    let agent: Agent = Agent::config_builder().timeout_global(Some(TIMEOUT)).http_status_as_error(false).build().into();
    let mut request = agent.get(&url);
    if let Some(Secret(key)) = &args.api_key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let mut response = request.call().with_context(|| format!("{url} does not answer"))?;
    let status = response.status().as_u16();
    let text = response.body_mut().read_to_string().with_context(|| format!("{url} broke off its answer"))?;
    if status != 200 {
        bail!("{url} answers {status}: {}", one_line(text.trim()));
    }
    let models: Models = serde_json::from_str(&text).with_context(|| format!("{url} is not a PegaInfer server"))?;
    print(&table(&models.data, SystemTime::now()))
}

fn table(models: &[Model], now: SystemTime) -> String {
    let width = models.iter().map(|model| model.id.len()).max().unwrap_or(0).max(4);
    let mut text = format!("{:width$}  {:9}  {:>10}  LAST USED\n", "NAME", "STATE", "MEMORY");
    for model in models {
        let mut used = model.last_used.map_or("never".to_owned(), |at| ago(now, at));
        for note in [
            model.pinned.then(|| "pinned".to_owned()),
            model.parent.as_ref().map(|parent| format!("adapter of {parent}")),
            model.error.clone(),
        ] {
            used += &note.map_or_else(String::new, |note| format!("; {note}"));
        }
        let (id, used) = (one_line(&model.id), one_line(&used));
        let memory = DecimalBytes(model.memory_bytes).to_string();
        let _ = writeln!(text, "{id:width$}  {:9}  {memory:>10}  {used}", one_line(&model.state));
    }
    text
}

/// How long ago a time in Unix seconds was.
fn ago(now: SystemTime, at: u64) -> String {
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    match now.saturating_sub(at) {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds => format!("{} h ago", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_a_model() {
        let json = r#"{"data": [
            {"id": "small", "parent": null, "state": "loaded", "pinned": true, "memory_bytes": 2500000, "last_used": 940},
            {"id": "x\ny", "parent": null, "state": "failed", "error": "cut off", "pinned": false, "memory_bytes": 0,
             "last_used": null}]}"#;
        let models: Models = serde_json::from_str(json).unwrap();
        let text = table(&models.data, UNIX_EPOCH + Duration::from_secs(1000));
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[1], "small  loaded        2.50 MB  60 s ago; pinned");
        assert!(rows[2].contains("failed") && rows[2].ends_with("never; cut off"), "{text}");
        assert_eq!(rows.len(), 3);
    }
}
