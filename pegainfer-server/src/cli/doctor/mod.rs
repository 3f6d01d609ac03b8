//! `pegainfer doctor`: reports what the machine has. Where a GPU is, compares every op on it with its reference kernel:
//! alone, overlapped with its neighbours, and replayed in a CUDA graph. With `--ledger`: compares step times with a
//! ledger.

mod ledger_check;
mod machine;
mod models;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser};
use models::{Model, StepShape, steps};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::weights::format_of;
use pegainfer_kernels::compare::{Case, compare};
use pegainfer_kernels::cuda;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::model_path;
use pegainfer_terminal::stdout::print;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

/// Steps whose ops are checked. They cover every kernel that is chosen by batch size.
const STEPS: [StepShape; 13] = [
    (1, 1, 1024),
    (2, 1, 300),
    (3, 1, 100),
    (8, 1, 1024),
    (16, 1, 300),
    (32, 1, 1024),
    (64, 1, 512),
    (2, 3, 50),
    (4, 40, 200),
    (1, 512, 512),
    (1, 300, 1500),
    (1, 1100, 1100),
    (2, 250, 512),
];

/// Flags of `doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Model to take the shapes from: a directory (config.json is enough) or a Hugging Face id. DeepSeek-V4 is checked
    /// with at most 16 routed experts [default: the bundled model, and the shapes of Qwen3-4B, Qwen3.5-4B and
    /// DeepSeek-V4-Flash]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Index of the GPU, counted from 0 [default: 0, if there is one]
    #[arg(long)]
    pub gpu: Option<usize>,
    /// Also ask the Hugging Face hub whether it can be reached
    #[arg(long)]
    pub hub: bool,
    /// Port to look at
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Instead of the ops, check the time of a dozen steps against this ledger, with its engine flags; missing weights
    /// are replaced by random ones
    #[arg(long, value_name = "FILE")]
    pub ledger: Option<PathBuf>,
}

/// The engine's flags, for their defaults.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> Result<()> {
    if let Some(file) = &args.ledger {
        return ledger_check::run(file, args.model_path.as_deref(), args.gpu.unwrap_or(0));
    }
    let build = if cuda::images::BUILT { "with CUDA kernels" } else { "CPU-only" };
    print(&format!("build: pegainfer {}, {build}\n", env!("CARGO_PKG_VERSION")))?;
    let findings = machine::findings(&Defaults::try_parse_from(["doctor"])?.engine, args.port, args.hub);
    for finding in &findings {
        print(&finding.line())?;
    }
    match cuda::available() {
        Ok(_) => check_ops(args, args.gpu.unwrap_or(0))?,
        // To ask for a GPU's check is to expect one.
        Err(why) if args.gpu.is_some() || args.model_path.is_some() => bail!("no op was checked: {why}"),
        Err(why) => print(&format!("GPU: none is used: {why}\n"))?,
    }
    let problems = findings.iter().filter(|finding| finding.is_problem()).count();
    ensure!(problems == 0, "the report names {problems} problem{}", if problems == 1 { "" } else { "s" });
    print("ok\n")
}

/// Compares every op on GPU `ordinal` with its reference kernel.
fn check_ops(args: &DoctorArgs, ordinal: usize) -> Result<()> {
    let mut gpu = cuda::open(ordinal, None)?;
    gpu.set_activations(steps::ACTIVATIONS);
    let info = gpu.gpu()?.info()?;
    print(&format!(
        "driver: speaks CUDA {}.{}\nGPU {}: {}, compute capability {}.{}, {} multiprocessors, {:.1} GB, {:.1} GB free\n",
        info.driver / 1000,
        info.driver % 1000 / 10,
        ordinal,
        info.name,
        info.capability.0,
        info.capability.1,
        info.multiprocessors,
        info.memory as f64 / 1e9,
        info.free as f64 / 1e9
    ))?;
    match cuda::blaslt(&mut gpu) {
        Ok(found) => print(&format!("cuBLASLt {found}\n"))?,
        Err(why) => print(&format!("cuBLASLt: {why}\n"))?,
    }
    let mut cpu = Exec::cpu(Isa::best(), None).context("the CPU threads cannot be started")?;
    let model = model_path::resolve_config(args.model_path.as_deref())?;
    let named = |(more, loaded): (&str, Model)| (format!("{model}{more}"), loaded);
    let mut models: Vec<_> = Model::load(&model.dir)?.into_iter().map(named).collect();
    if args.model_path.is_none() {
        models.extend(models::typical().map(|(name, model)| (name.to_owned(), model)));
    }
    models.push(("a small model with group-quantised weights".to_owned(), Model::small_groups()));
    let mut report = DoctorReport::default();
    for (name, model) in &models {
        print(&format!("\nops of {name}\n"))?;
        let begin = Instant::now();
        report.model(&mut cpu, &mut gpu, model)?;
        print(&format!("took {:.0} s\n", begin.elapsed().as_secs_f64()))?;
    }
    print(&format!("\n{} calls checked in {} runs, {} runs failed\n", report.seen.len(), report.runs, report.failed))?;
    ensure!(report.failed == 0, "the GPU does not agree with the CPU: do not use it");
    Ok(())
}

/// Results so far.
#[derive(Default)]
struct DoctorReport {
    seen: HashSet<String>,
    /// Number of launches (calls times ways of launching), and how many failed.
    runs: usize,
    failed: usize,
}

impl DoctorReport {
    fn model(&mut self, cpu: &mut Exec, gpu: &mut Exec, model: &Model) -> Result<()> {
        print(&format!(
            "{:<27} {:<22} {:<44} {:>10} {:>10}  verdict\n",
            "op", "kernel", "shapes", "max error", "relative"
        ))?;
        for &(batch, tokens, context) in STEPS.iter().chain(model.more_steps) {
            let case = model.case(context);
            for record in model.records(batch, tokens, context)? {
                if self.seen.insert(key(&record, context)) {
                    self.op(cpu, gpu, &record, &case)?;
                }
            }
        }
        Ok(())
    }

    fn op(&mut self, cpu: &mut Exec, gpu: &mut Exec, record: &OpRecord, case: &Case) -> Result<()> {
        let compared = compare(cpu, gpu, record, case)
            .with_context(|| format!("{} of {} did not run", record.op, shapes(record)))?;
        let Some(result) = compared else { bail!("{} has no comparison", record.op) };
        (self.runs, self.failed) = (self.runs + result.runs, self.failed + result.failures.len());
        let verdict = match result.ok() {
            true => format!("ok ({} runs)", result.runs),
            false => format!("FAILED {} of {}: {}", result.failures.len(), result.runs, result.failures.join("; ")),
        };
        let (kernel, shapes) = (result.kernel, shapes(record));
        let (absolute, relative) = (result.absolute, result.relative);
        print(&format!(
            "{:<27} {kernel:<22} {shapes:<44} {absolute:>10.2e} {relative:>10.2e}  {verdict}\n",
            record.op
        ))?;
        Ok(())
    }
}

/// Key of a call: calls with equal keys differ only in their values.
fn key(record: &OpRecord, context: usize) -> String {
    let attends = record.op.ends_with("attention") || record.op == "decode_layers";
    let context = if attends { context } else { 0 };
    let operand = |o: &Operand| (o.shape.clone(), o.dtype, format_of(&o.name));
    let shapes: Vec<_> = record.reads.iter().chain(&record.writes).map(operand).collect();
    format!("{} {context} {shapes:?}", record.op)
}

/// The operands that distinguish calls of one op.
fn shapes(record: &OpRecord) -> String {
    let shape = |o: &Operand| format!("{:?}", o.shape).replace(", ", ",");
    let reads: Vec<String> = record.reads.iter().take(2).map(shape).collect();
    let writes: Vec<String> = record.writes.iter().take(1).map(shape).collect();
    format!("{} -> {}", reads.join(" "), writes.join(" "))
}

#[cfg(test)]
mod tests;
