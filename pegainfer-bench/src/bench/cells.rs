//! Cells of public benchmarks: lengths and concurrencies, so that one command measures what others publish.
//!
//! - SGLang's cookbook: random prompts of 8,192 tokens, answers of 1,024.
//! - Artificial Analysis, load test: 1,000 and 1,000 tokens; the concurrency doubles up to 64 and then grows by 64.
//! - InferenceX: fixed lengths; drafts are accepted at agreed ("golden") mean lengths, because random prompts say nothing
//!   about acceptance. Its rules ask forks to call their results unofficial.

use super::args::{Benchmark, CellsArgs};
use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::json;
use std::fmt;
use std::num::NonZeroUsize;

/// Default maximum concurrency of a ramp.
const MAX_CONCURRENCY: usize = 64;
/// Minimum number of requests in a cell.
const MIN_REQUESTS: usize = 8;
/// Golden acceptance lengths of DeepSeek-V4 with reasoning: method, draft tokens, tokens per step.
const GOLDEN: [(&str, usize, f64); 2] = [("mtp", 3, 2.49), ("dspark", 5, 3.61)];

/// One cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Prompt length in tokens.
    pub prompt_len: usize,
    /// Output length in tokens.
    pub output_len: usize,
    /// Number of concurrent requests.
    pub streams: usize,
    /// Number of requests in a run.
    pub requests: usize,
}

/// Description of the cells in a report.
#[derive(Debug, Clone, Serialize)]
pub struct CellsSummary {
    /// Name of the benchmark.
    pub benchmark: &'static str,
    /// True if its rules ask to call results of others unofficial.
    pub unofficial: bool,
    /// Flags that the server must have been started with, if it drafts: one of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub server_flags: Vec<String>,
}

impl Benchmark {
    /// Prompt and output lengths in tokens.
    fn lengths(self) -> &'static [(usize, usize)] {
        match self {
            Self::Sglang => &[(8192, 1024)],
            Self::ArtificialAnalysis => &[(1000, 1000)],
            Self::InferenceX => &[(1024, 1024), (1024, 8192), (8192, 1024)],
        }
    }

    /// Concurrencies up to `max`.
    fn concurrencies(self, max: Option<usize>) -> Vec<usize> {
        let fixed: &[usize] = match self {
            Self::Sglang => &[1, 16, 64, 256, 1024],
            Self::InferenceX => &[4, 8, 16, 32, 64],
            Self::ArtificialAnalysis => {
                let next = |n: &usize| Some(if *n < 64 { 2 * n } else { n + 64 });
                let max = max.unwrap_or(MAX_CONCURRENCY);
                return std::iter::successors(Some(1), next).take_while(|n| *n <= max).collect();
            }
        };
        fixed.iter().copied().filter(|n| max.is_none_or(|max| *n <= max)).collect()
    }

    /// Requests per run and concurrent client.
    fn requests(self) -> usize {
        if self == Self::Sglang { 4 } else { 10 }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Sglang => "SGLang cookbook",
            Self::ArtificialAnalysis => "Artificial Analysis load test",
            Self::InferenceX => "InferenceX",
        }
    }
}

impl CellsArgs {
    /// The cells in order: all concurrencies of the first lengths, then those of the next ones.
    pub fn cells(&self) -> Vec<Cell> {
        let max = self.max_concurrency.map(NonZeroUsize::get);
        let is_chosen =
            |n: &usize| self.concurrency.is_empty() || self.concurrency.iter().any(|chosen| chosen.get() == *n);
        let streams: Vec<usize> = self.name.concurrencies(max).into_iter().filter(is_chosen).collect();
        let per_client = self.requests.map_or(self.name.requests(), NonZeroUsize::get);
        let cell = |prompt_len, output_len, streams: usize| {
            let requests = (streams * per_client).max(if self.requests.is_none() { MIN_REQUESTS } else { 1 });
            Cell { prompt_len, output_len, streams, requests }
        };
        let lengths = self.name.lengths().iter();
        lengths.flat_map(|&(prompt, output)| streams.iter().map(move |&n| cell(prompt, output, n))).collect()
    }

    /// Refuses a concurrency that is no cell.
    pub fn check(&self) -> Result<()> {
        let known = self.name.concurrencies(self.max_concurrency.map(NonZeroUsize::get));
        for chosen in &self.concurrency {
            ensure!(
                known.contains(&chosen.get()),
                "{} has no cell of concurrency {chosen}: there are {known:?}",
                self.name.title()
            );
        }
        ensure!(!known.is_empty(), "{} has no cell of so low a --max-concurrency", self.name.title());
        Ok(())
    }

    /// Description of the cells for the report.
    pub fn summary(&self) -> CellsSummary {
        let is_inferencex = self.name == Benchmark::InferenceX;
        let golden = GOLDEN.iter().filter(|_| is_inferencex);
        let server_flags = golden.map(|(method, drafts, length)| {
            let config = json!({
                "method": method, "num_speculative_tokens": drafts, "synthetic_acceptance_length": length,
            });
            format!("--speculative-config '{config}'")
        });
        let server_flags = server_flags.collect();
        CellsSummary { benchmark: self.name.title(), unofficial: is_inferencex, server_flags }
    }
}

impl fmt::Display for CellsSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { benchmark, unofficial, server_flags } = self;
        writeln!(f, "{benchmark}{}", if *unofficial { ", unofficial" } else { "" })?;
        if !server_flags.is_empty() {
            writeln!(f, "With drafts, a server of DeepSeek-V4 must run at a golden acceptance length, with one of")?;
        }
        server_flags.iter().try_for_each(|flag| writeln!(f, "  {flag}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        cells: CellsArgs,
    }

    fn args(flags: &[&str]) -> CellsArgs {
        Flags::parse_from(["cells"].iter().chain(flags)).cells
    }

    #[test]
    fn cells_are_those_of_the_benchmarks() {
        let of = |flags: &[&str]| -> Vec<(usize, usize, usize, usize)> {
            let cells = args(flags).cells();
            cells.iter().map(|cell| (cell.prompt_len, cell.output_len, cell.streams, cell.requests)).collect()
        };
        let sglang = [(1, 8), (16, 64), (64, 256), (256, 1024), (1024, 4096)];
        assert_eq!(of(&["sglang"]), sglang.map(|(streams, requests)| (8192, 1024, streams, requests)));
        let ramp = |flags: &[&str]| of(flags).iter().map(|cell| cell.2).collect::<Vec<_>>();
        assert_eq!(ramp(&["artificial-analysis"]), [1, 2, 4, 8, 16, 32, 64]);
        let long = ramp(&["artificial-analysis", "--max-concurrency", "200"]);
        assert_eq!(long, [1, 2, 4, 8, 16, 32, 64, 128, 192]);
        let inferencex = of(&["inferencex", "--concurrency", "64,4"]);
        let lengths = [(1024, 1024), (1024, 8192), (8192, 1024)];
        let expected = lengths.map(|(prompt, output)| [(prompt, output, 4, 40), (prompt, output, 64, 640)]);
        assert_eq!(inferencex, expected.concat());
        assert_eq!(of(&["sglang", "--max-concurrency", "16", "--requests", "2"])[1], (8192, 1024, 16, 32));
        assert_eq!(of(&["sglang", "--concurrency", "1", "--requests", "2"]), [(8192, 1024, 1, 2)]);
    }

    #[test]
    fn a_concurrency_without_cell_is_refused() {
        let error = |flags: &[&str]| args(flags).check().unwrap_err().to_string();
        let expected = "SGLang cookbook has no cell of concurrency 7: there are [1, 16, 64, 256, 1024]";
        assert_eq!(error(&["sglang", "--concurrency", "1,7"]), expected);
        assert!(error(&["sglang", "--concurrency", "64", "--max-concurrency", "16"]).contains("there are [1, 16]"));
        assert!(error(&["inferencex", "--max-concurrency", "2"]).contains("no cell of so low"));
        assert!(args(&["artificial-analysis", "--max-concurrency", "128", "--concurrency", "128"]).check().is_ok());
    }

    #[test]
    fn inferencex_is_unofficial_and_names_the_servers_flags() {
        let summary = args(&["inferencex"]).summary().to_string();
        assert!(summary.starts_with("InferenceX, unofficial\n"), "{summary}");
        for (method, drafts, length) in [("mtp", "3", "2.49"), ("dspark", "5", "3.61")] {
            let flag = summary.lines().find(|line| line.contains(method)).unwrap();
            let value = flag.trim().strip_prefix("--speculative-config '").unwrap().strip_suffix('\'').unwrap();
            let config: serde_json::Value = serde_json::from_str(value).unwrap();
            assert_eq!(config["num_speculative_tokens"].to_string(), drafts);
            assert_eq!(config["synthetic_acceptance_length"].to_string(), length);
        }
        assert_eq!(args(&["sglang"]).summary().to_string(), "SGLang cookbook\n");
    }
}
