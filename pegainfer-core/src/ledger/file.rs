//! The ledger as a file: JSON Lines, the header first.

use super::anchor::Anchor;
use super::kernel_line::KernelLine;
use super::law::{Law, LawError};
use super::load::{StepLine, StepLoad};
use crate::schedule::StateConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::io::{self, BufRead, Write};
use thiserror::Error;

/// Version of the format.
const VERSION: u32 = 1;

/// The measured engine: decides whether a ledger applies, and configures a simulation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format.
    pub version: u32,
    /// Version of the program.
    pub program: String,
    /// Hash of the sources of all kernels; a ledger with a different hash is stale.
    pub kernels: String,
    /// Date of the measurement (UTC), such as 2026-11-26; `None` in older ledgers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<String>,
    /// The model path as given.
    pub model: String,
    /// Name of the device.
    pub device: String,
    /// Ranks that share the model (tensor parallelism); ops were timed on rank 0. 1 in older ledgers.
    #[serde(default = "one_rank", skip_serializing_if = "is_one_rank")]
    pub ranks: usize,
    /// CUDA version of its driver; `None` on the CPU, and in older ledgers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Format of `--quantization`; `None` for the checkpoint's own format.
    pub quantization: Option<String>,
    /// Element format of the KV cache.
    pub kv_cache_dtype: String,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Context length in tokens.
    pub max_model_len: usize,
    /// Token ids are below this number.
    pub vocab_size: usize,
    /// Maximum number of running sequences.
    pub max_num_seqs: usize,
    /// Maximum number of tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Maximum number of tokens in a mixed step; see `--mixed-step-token-budget`.
    pub max_num_mixed_tokens: usize,
    /// Steps in flight.
    pub depth: usize,
    /// True if decode steps are padded to the sizes of CUDA graphs.
    pub graphs: bool,
    /// State slots of a model with state other than a KV cache.
    pub state: Option<StateConfig>,
}

/// Time of one op in a measured step, over all layers. Calls with other operands or another kernel have a separate
/// line.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OpLine {
    /// Load of the step.
    #[serde(flatten)]
    pub load: StepLoad,
    /// The op.
    pub op: String,
    /// Kernel that runs the op; empty in older ledgers.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kernel: String,
    /// Operands of the op; see [`OpRecord::operands`](crate::record::OpRecord::operands). Empty in older ledgers, which
    /// have one line for all calls of an op.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub operands: String,
    /// Calls in the step.
    pub calls: usize,
    /// Total time of the calls in microseconds.
    pub us: f64,
}

/// Time of the engine thread per step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct HostCost {
    /// Microseconds to plan and commit a step.
    pub step_us: f64,
    /// The part per sequence.
    pub row_us: f64,
}

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Ledger(Header),
    Host(HostCost),
    Config(Value),
    Anchor(Anchor),
    Step(StepLine),
    Op(OpLine),
    Kernel(KernelLine),
}

/// The contents of a ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct Ledger {
    /// The engine.
    pub header: Header,
    /// The engine thread.
    pub host: HostCost,
    /// The model's config.json, from which the ops of any step are derived; `None` in older ledgers.
    pub config: Option<Value>,
    /// Steps measured again on the header's device, if the others were measured on another one.
    pub anchor: Option<Anchor>,
    /// Steps.
    pub steps: Vec<StepLine>,
    /// Ops of some of the steps.
    pub ops: Vec<OpLine>,
    /// Kernels of steps recorded by CUPTI, in the order of their first completion in the step.
    pub kernels: Vec<KernelLine>,
}

/// Reason why a ledger cannot be read.
#[derive(Debug, Error)]
pub enum LedgerError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A line is not a line of a ledger.
    #[error("line {line} is not a line of a ledger: {cause}; write one with pegainfer ledger")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// Error of the parser.
        cause: serde_json::Error,
    },
    /// The first line is not a header.
    #[error("the first line is not the header of a ledger; write one with pegainfer ledger")]
    Header,
    /// A number is out of the range that an engine can have.
    #[error("{0}: this is not a ledger of an engine; write one with pegainfer ledger")]
    Number(String),
    /// The file was written by a later version.
    #[error("the ledger has format {0}, and this program knows {VERSION}; measure it again with pegainfer ledger")]
    Version(u32),
}

fn one_rank() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_one_rank(ranks: &usize) -> bool {
    *ranks == 1
}

impl Header {
    /// The version of the format that this program writes.
    pub const VERSION: u32 = VERSION;

    /// The state slots of an engine of these sizes; `None` for a model without slots.
    pub fn state_config(&self) -> Option<StateConfig> {
        Some(StateConfig { sequences: self.max_num_seqs, block_tokens: self.block_size, ..self.state? })
    }
}

impl Ledger {
    /// Reads a file.
    pub fn read(lines: impl BufRead) -> Result<Self, LedgerError> {
        let mut ledger: Option<Self> = None;
        for (i, text) in lines.lines().enumerate() {
            let line = serde_json::from_str(&text?).map_err(|cause| LedgerError::Line { line: i + 1, cause })?;
            match (line, &mut ledger) {
                (Line::Ledger(header), None) if header.version == VERSION => {
                    let host = HostCost::default();
                    let (steps, ops, kernels) = (Vec::new(), Vec::new(), Vec::new());
                    ledger = Some(Self { header, host, config: None, anchor: None, steps, ops, kernels });
                }
                (Line::Ledger(header), None) => return Err(LedgerError::Version(header.version)),
                (Line::Host(host), Some(ledger)) => ledger.host = host,
                (Line::Config(config), Some(ledger)) => ledger.config = Some(config),
                (Line::Anchor(anchor), Some(ledger)) => ledger.anchor = Some(anchor),
                (Line::Step(step), Some(ledger)) => ledger.steps.push(step),
                (Line::Op(op), Some(ledger)) => ledger.ops.push(op),
                (Line::Kernel(kernel), Some(ledger)) => ledger.kernels.push(kernel),
                _ => return Err(LedgerError::Header),
            }
        }
        let ledger = ledger.ok_or(LedgerError::Header)?;
        ledger.check().map_err(LedgerError::Number)?;
        Ok(ledger)
    }

    /// Writes a file.
    pub fn write(&self, out: &mut impl Write) -> Result<(), LedgerError> {
        let steps = self.steps.iter().cloned().map(Line::Step);
        let ops = self.ops.iter().cloned().map(Line::Op);
        let kernels = self.kernels.iter().cloned().map(Line::Kernel);
        let config = self.config.clone().map(Line::Config);
        let anchor = self.anchor.clone().map(Line::Anchor);
        let head = [Line::Ledger(self.header.clone()), Line::Host(self.host)];
        for line in head.into_iter().chain(config).chain(anchor).chain(steps).chain(ops).chain(kernels) {
            serde_json::to_writer(&mut *out, &line).map_err(io::Error::from)?;
            writeln!(out)?;
        }
        Ok(out.flush()?)
    }

    /// The steps, corrected for the device of the header.
    pub fn anchored_steps(&self) -> Cow<'_, [StepLine]> {
        match &self.anchor {
            Some(anchor) => Cow::Owned(anchor.scale(&self.steps)),
            None => Cow::Borrowed(&self.steps),
        }
    }

    /// The law of these steps.
    pub fn law(&self) -> Result<Law, LawError> {
        Law::new(&self.anchored_steps(), self.header.graphs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::anchor::Remeasured;
    use super::*;

    fn ledger() -> Ledger {
        let state = StateConfig { sequences: 4, snapshots: 2, interval: 256, block_tokens: 16, within_chunks: true };
        let header = Header {
            version: VERSION,
            program: "0.1.0".into(),
            kernels: "0123".into(),
            measured: Some("2026-11-26".into()),
            model: "m".into(),
            device: "cpu".into(),
            ranks: 2,
            driver: None,
            quantization: None,
            kv_cache_dtype: "bf16".into(),
            kv_blocks: 64,
            block_size: 16,
            max_model_len: 512,
            vocab_size: 100,
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            max_num_mixed_tokens: 32,
            depth: 1,
            graphs: false,
            state: Some(state),
        };
        let load = StepLoad { decode_rows: 2, decode_kv: 50, ..StepLoad::default() };
        let steps = vec![StepLine { load, us: 12.5, spread: 0.01, runs: 9 }];
        let ops = vec![OpLine { load, op: "linear".into(), calls: 3, us: 7.0, ..OpLine::default() }];
        let config = Some(serde_json::json!({"hidden_size": 64, "rms_norm_eps": 1e-6}));
        let (kernel, grid) = ("gemv".to_owned(), [132, 1, 1]);
        let kernels = vec![KernelLine { load, kernel, grid, calls: 3, us: 6.5, idle_us: 0.5, own_us: 9.0 }];
        Ledger { header, host: HostCost { step_us: 1.5, row_us: 0.25 }, config, anchor: None, steps, ops, kernels }
    }

    #[test]
    fn what_is_written_is_read() {
        let (ledger, mut file) = (ledger(), Vec::new());
        ledger.write(&mut file).unwrap();
        assert_eq!(file.iter().filter(|b| **b == b'\n').count(), 6);
        assert_eq!(Ledger::read(&file[..]).unwrap(), ledger);
        let more = Header { max_num_seqs: 9, ..ledger.header.clone() };
        assert_eq!(more.state_config(), Some(StateConfig { sequences: 9, ..ledger.header.state.unwrap() }));
    }

    #[test]
    fn an_anchor_scales_the_law_and_leaves_the_lines() {
        let prefill = StepLoad { prefill_rows: 1, prefill_tokens: 8, pairs: 36, ..StepLoad::default() };
        let decode = ledger().steps[0].load;
        let again = |load, ledger_us, us| Remeasured { load, ledger_us, us };
        let steps = vec![again(decode, 12.5, 25.0), again(prefill, 80.0, 60.0)];
        let mut ledger = Ledger { anchor: Some(Anchor { ledger_device: "cpu".into(), steps }), ..ledger() };
        ledger.steps.push(StepLine { load: prefill, us: 80.0, spread: 0.0, runs: 1 });
        let mut file = Vec::new();
        ledger.write(&mut file).unwrap();
        let read = Ledger::read(&file[..]).unwrap();
        assert_eq!(read, ledger);
        assert_eq!(read.steps[0].us, 12.5);
        let law = read.law().unwrap();
        assert_eq!((law.time(&decode).us, law.time(&prefill).us), (25.0, 60.0));
    }

    #[test]
    fn other_files_are_refused_by_line() {
        let read = |text: &str| Ledger::read(text.as_bytes()).unwrap_err().to_string();
        assert!(read("").contains("header"));
        assert!(read("{\"host\":{\"step_us\":1,\"row_us\":1}}\n").contains("header"));
        let mut file = Vec::new();
        ledger().write(&mut file).unwrap();
        let text = String::from_utf8(file).unwrap();
        assert!(read(&text.replace("\"version\":1", "\"version\":7")).contains("format 7"));
        let broken = text.replacen("{\"step\"", "{\"stop\"", 1);
        assert!(read(&broken).starts_with("line 4 is not a line of a ledger"), "{}", read(&broken));
    }
}
