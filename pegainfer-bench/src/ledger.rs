//! `pegainfer ledger`: measures the steps of a model on this device for `pegainfer sim`, or some of them to correct
//! another device's ledger.

mod floors;
mod kernel_table;
mod op_table;
mod plots;
mod steps;

use super::anchor;
use super::bench::args::parse_positive;
use super::bench::report::number;
use super::shipped::{self, ShippedArgs};
use super::sim::host::host_cost;
use super::stale;
use anyhow::{Context, Result, anyhow, ensure};
use clap::{ArgGroup, Args};
use floors::Given;
use kernel_table::kernel_tables;
use op_table::op_tables;
use pegainfer_core::ledger::{Effort, Header, Law, Ledger, Residual, Rows, Selection, StepKind};
use pegainfer_kernels::cuda;
use pegainfer_model_files::ModelFiles;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_models::model_path::{self, ModelDir};
use pegainfer_runtime::Measured;
use pegainfer_terminal::stdout::print;
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::Duration;
use steps::{StepArg, parse_step};

/// Measuring time per step, and total time for halving intervals.
const FULL: Effort = Effort { per_step: Duration::from_millis(200), refine: Duration::from_secs(150) };
/// Measuring times with `--quick`.
const QUICK: Effort = Effort { per_step: Duration::from_millis(40), refine: Duration::from_secs(30) };

/// Flags of `ledger`.
#[derive(Debug, Clone, Args)]
#[command(group(ArgGroup::new("shown").args(["svg", "ops"]).multiple(true)))]
pub struct LedgerArgs {
    /// Plot this ledger (--svg) or print its ops (--ops) instead of measuring one
    #[arg(value_name = "LEDGER", requires = "shown", conflicts_with_all = ["out", "quick", "anchor", "steps"])]
    pub ledger: Option<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE", required_unless_present_any = ["ledger", "gpu", "model", "steps"])]
    pub out: Option<PathBuf>,
    /// Directory for plots of the ledger: steps.svg, ops.svg, errors.svg, roofline.svg, efficiency.svg
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Print the timed ops and recorded kernels, the longest first
    #[arg(long)]
    pub ops: bool,
    /// Write (--out), plot (--svg) or print (--ops) a ledger inside the executable instead of measuring one.
    #[command(flatten)]
    pub shipped: ShippedArgs,
    /// Measure each step for a fifth of the time
    #[arg(long, conflicts_with_all = ["gpu", "model"])]
    pub quick: bool,
    /// Measure only these steps and print their ops: decode:SEQUENCES:CONTEXT, prefill:TOKENS, or
    /// prefill:TOKENS:CONTEXT for a chunk after cached tokens
    #[arg(long, value_name = "STEP,..", value_delimiter = ',', value_parser = parse_step,
        conflicts_with_all = ["quick", "anchor", "gpu", "model"])]
    pub steps: Vec<StepArg>,
    /// With --steps: record the kernels with CUPTI, and print what each adds to its step
    #[arg(long, requires = "steps")]
    pub cupti: bool,
    /// Measure a dozen steps of this ledger again, and write it with factors for this device
    #[arg(long, value_name = "LEDGER", conflicts_with_all = ["quick", "gpu", "model"])]
    pub anchor: Option<PathBuf>,
    /// Memory bandwidth for roofline.svg and efficiency.svg, in GB/s [default: the datasheet's]
    #[arg(long, value_name = "GB/S", value_parser = parse_positive, requires = "svg")]
    pub read_gbs: Option<f64>,
    /// bf16 rate for roofline.svg and efficiency.svg, in TFLOP/s [default: the datasheet's]
    #[arg(long, value_name = "TFLOP/S", value_parser = parse_positive, requires = "svg")]
    pub peak_tflops: Option<f64>,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &LedgerArgs) -> Result<()> {
    // Report a path that cannot be written before the measurement, not after it. An existing file stays until then.
    if let Some(dir) = &args.svg {
        std::fs::create_dir_all(dir).with_context(|| format!("--svg {} cannot be created", dir.display()))?;
    }
    let out = args.out.as_deref().map(OutputFile::new).transpose()?;
    if args.ledger.is_some() || args.shipped.is_given() {
        let ledger = shipped::read(args.ledger.as_deref(), &args.shipped)?;
        ensure!(
            out.is_some() || args.svg.is_some() || args.ops,
            "give --out, --svg or --ops: the ledger is inside this executable already"
        );
        write(&ledger, out, args)?;
        return if args.ops { print(&(op_tables(&ledger) + &kernel_tables(&ledger))) } else { Ok(()) };
    }
    if args.cupti {
        // CUPTI has to start before a GPU is opened.
        cuda::cupti::start().map_err(|why| anyhow!("--cupti: {why}"))?;
    }
    let model = model_path::resolve(&args.engine)?;
    let (ledger, mut report) = match &args.anchor {
        Some(base) => anchored(base, &model, &args.engine)?,
        None => measured(&model, args)?,
    };
    write(&ledger, out, args)?;
    if args.ops || !args.steps.is_empty() {
        report += &op_tables(&ledger);
        report += &kernel_tables(&ledger);
    }
    print(&report)
}

/// Writes the ledger and its plots, if requested.
fn write(ledger: &Ledger, out: Option<OutputFile<'_>>, args: &LedgerArgs) -> Result<()> {
    out.map_or(Ok(()), |out| out.replace(ledger))?;
    let LedgerArgs { read_gbs, peak_tflops, .. } = *args;
    let given = Given { model_path: args.engine.model_path.as_deref(), read_gbs, peak_tflops };
    args.svg.as_ref().map_or(Ok(()), |dir| plots::write(ledger, dir, given))
}

/// The ledger in `base` with factors for this device, and a summary of their measurement.
fn anchored(base: &Path, model: &ModelDir, args: &EngineArgs) -> Result<(Ledger, String)> {
    let ledger = anchor::read(base)?;
    let (header, anchor) = anchor::measure(&ledger, model, args)?;
    let mut report = anchor::table(&anchor);
    if let Some(warning) = stale::warning(&ledger.header) {
        report += &format!("{warning}; factors do not change that\n");
    }
    // The measured ledger decides whether the result is stale.
    let Header { kernels, program, measured, .. } = ledger.header.clone();
    let header = Header { kernels, program, measured, ..header };
    let config = ledger.config.clone().map_or_else(|| config(model), Ok)?;
    Ok((Ledger { header, anchor: Some(anchor), config: Some(config), ..ledger }, report))
}

/// A ledger of this device, and its summary.
fn measured(model: &ModelDir, args: &LedgerArgs) -> Result<(Ledger, String)> {
    let steps: Vec<Rows> = args.steps.iter().map(|step| step.0.clone()).collect();
    let selection = match (&steps[..], args.quick) {
        ([], quick) => Selection::Grid(if quick { QUICK } else { FULL }),
        (steps, _) => Selection::Steps { steps, kernels: args.cupti },
    };
    let measured = engine::measure(&model.dir, &args.engine, selection, &mut |line| {
        log::debug!("{:?}: {:.1} us, spread {:.1} %", line.load, line.us, 100.0 * line.spread);
    })?;
    let mut header = measured.header.clone();
    header.model = model.to_string();
    header.measured = Some(stale::today().to_string());
    header.quantization = args.engine.formats.quantization.map(|format| format.at_load().name().to_owned());
    let host = host_cost(&header)?;
    let config = Some(config(model)?);
    let Measured { steps: lines, ops, kernels, .. } = measured;
    let ledger = Ledger { header, host, config, anchor: None, steps: lines, ops, kernels };
    let report = if steps.is_empty() { summary(&ledger) } else { String::new() };
    Ok((ledger, report))
}

/// The config.json of the measured model.
fn config(model: &ModelDir) -> Result<Value> {
    let files = ModelFiles::open(&model.dir)?;
    let unreadable = || format!("{} cannot be read", files.path("config.json").display());
    let text = files.read("config.json")?.with_context(unreadable)?;
    serde_json::from_str(&text).with_context(unreadable)
}

/// The file of `--out`.
struct OutputFile<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> OutputFile<'a> {
    /// Opens the file without changing it.
    fn new(path: &'a Path) -> Result<Self> {
        let file = File::options().write(true).create(true).truncate(false).open(path);
        Ok(Self { path, file: file.with_context(|| format!("{} cannot be written", path.display()))? })
    }

    /// Replaces the content of the file by the ledger.
    fn replace(self, ledger: &Ledger) -> Result<()> {
        let Self { path, file } = self;
        let write = || -> Result<()> {
            // A pipe or a terminal has no length.
            if file.metadata()?.is_file() {
                file.set_len(0)?;
            }
            Ok(ledger.write(&mut BufWriter::new(file))?)
        };
        write().with_context(|| format!("{} cannot be written", path.display()))
    }
}

/// Number of measured steps, and prediction error on held-out steps.
fn summary(ledger: &Ledger) -> String {
    let residuals = Law::residuals(&ledger.steps, ledger.header.graphs);
    let mut out = format!("{} on {}\n", ledger.header.model, ledger.header.device);
    let _ = writeln!(
        out,
        "{:<8} {:>6} {:>11} {:>11} {:>9} {:>9}",
        "steps", "number", "min ms", "max ms", "error p50", "p95"
    );
    for kind in StepKind::ALL {
        let times = ledger.steps.iter().filter(|line| line.load.kind() == kind).map(|line| line.us / 1e3);
        let (count, min, max) =
            times.fold((0, f64::INFINITY, 0.0_f64), |(count, min, max), ms| (count + 1, min.min(ms), max.max(ms)));
        let of = residuals.iter().filter(|residual| residual.load.kind() == kind);
        let mut errors: Vec<f64> = of.map(|residual: &Residual| 100.0 * residual.relative().abs()).collect();
        errors.sort_unstable_by(f64::total_cmp);
        let at = |percent: usize| match errors.len() {
            0 => "-".to_owned(),
            n => format!("{:.1} %", errors[(n - 1) * percent / 100]),
        };
        let _ = writeln!(
            out,
            "{:<8} {count:>6} {:>11} {max:>11.3} {:>9} {:>9}",
            kind.name(),
            number(min, 3),
            at(50),
            at(95)
        );
    }
    let host = ledger.host;
    let _ =
        writeln!(out, "the engine thread takes {:.1} us per step and {:.2} us per sequence", host.step_us, host.row_us);
    out + "error: predicted from the other steps, against measured\n"
}
