//! `pegainfer doctor`: is there a GPU, and does every op on it agree with its CPU twin?

use crate::cli::DoctorArgs;
use crate::{detect, model_path};
use anyhow::{Context, Result, bail, ensure};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::rules::{Adjustment, LogitEdit, TokenMask};
use pegainfer_core::tensor::DType;
use pegainfer_kernels::compare::{Case, compare};
use pegainfer_kernels::{cuda, ops};
use pegainfer_qwen3_4b::config::Config;
use pegainfer_qwen3_4b::plan::Step;
use std::collections::HashSet;
use std::sync::Arc;

/// Steps whose ops are checked: rows, new tokens of each, context. Every kernel that a batch size chooses is among them.
const STEPS: [(usize, usize, usize); 10] = [
    (1, 1, 1024),
    (3, 1, 100),
    (8, 1, 1024),
    (16, 1, 300),
    (32, 1, 1024),
    (64, 1, 512),
    (2, 3, 50),
    (4, 40, 200),
    (1, 512, 512),
    (1, 300, 1500),
];

/// Runs the command.
pub fn run(args: &DoctorArgs) -> Result<()> {
    println!("build: {}", if cuda::images::BUILT { "with CUDA kernels" } else { "CPU-only" });
    cuda::available().map_err(anyhow::Error::msg)?;
    let mut gpu = Exec::cuda(args.gpu, None)?;
    let info = gpu.gpu()?.info()?;
    println!(
        "driver: speaks CUDA {}.{}\nGPU {}: {}, compute capability {}.{}, {} multiprocessors, {:.1} GB, {:.1} GB free",
        info.driver / 1000,
        info.driver % 1000 / 10,
        args.gpu,
        info.name,
        info.capability.0,
        info.capability.1,
        info.multiprocessors,
        info.memory as f64 / 1e9,
        info.free as f64 / 1e9
    );
    match gpu.gpu()?.blaslt() {
        Ok(found) => println!("cuBLASLt {found}"),
        Err(why) => println!("cuBLASLt: {why}"),
    }
    let mut cpu = Exec::cpu(Isa::best(), None).context("the CPU threads cannot be started")?;
    let dir = model_path::resolve_config(args.model_path.as_deref())?;
    let family = detect::detect(&dir)?;
    ensure!(family.has_cuda_kernels(), "{family} has no CUDA kernels yet: there is nothing to check");
    let mut models = vec![(dir.display().to_string(), Config::load(&dir)?)];
    if args.model_path.is_none() {
        models.push(("a model of Qwen3-4B's shape".to_owned(), qwen3_4b()));
    }
    let mut report = Report::default();
    for (name, config) in &models {
        println!("\nops of {name}");
        report.model(&mut cpu, &mut gpu, config)?;
    }
    println!("\n{} calls checked, {} failed", report.seen.len(), report.failed);
    ensure!(report.failed == 0, "the GPU does not agree with the CPU: do not use it");
    Ok(())
}

/// What was checked so far.
#[derive(Default)]
struct Report {
    seen: HashSet<String>,
    failed: usize,
}

impl Report {
    fn model(&mut self, cpu: &mut Exec, gpu: &mut Exec, config: &Config) -> Result<()> {
        println!("{:<22} {:<22} {:<44} {:>10} {:>10}  verdict", "op", "kernel", "shapes", "max error", "relative");
        for (batch, tokens, context) in STEPS {
            let case = Case { shape: config.shape, context, rope_theta: config.rope_theta };
            for record in records(config, batch, tokens, context)? {
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
        self.failed += usize::from(!result.ok);
        println!(
            "{:<22} {:<22} {:<44} {:>10.2e} {:>10.2e}  {}",
            record.op,
            result.kernel,
            shapes(record),
            result.absolute,
            result.relative,
            if result.ok { "ok" } else { "FAILED" }
        );
        Ok(())
    }
}

/// The ops of a step whose rows all want log-probabilities and have rules, and the one that makes dummy weights.
fn records(config: &Config, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>> {
    let mut step = Step::uniform(batch, tokens, context);
    let edit = |token: usize| LogitEdit { token: token as u32, scale: 1.0, add: 0.0 };
    let edits: Vec<LogitEdit> = (0..config.vocab_size.min(1000)).map(edit).collect();
    let allowed = Some(Arc::new(TokenMask::new(&[0], config.vocab_size)));
    for row in &mut step.samples {
        row.logprobs = Some(MAX_LOGPROBS);
        row.adjustment = Some(Adjustment { edits: edits.clone(), allowed: allowed.clone() });
    }
    let mut records = pegainfer_qwen3_4b::record_step(config, &step)?;
    let mut meta = Exec::meta()?;
    let mut matrix = meta.tensor("dummy weights", &[config.hidden_size, config.intermediate_size], DType::Bf16)?;
    let (filled, dummy) = meta.recording(|exec| ops::uniform(exec, 0, 0.0, &mut matrix));
    filled?;
    records.extend(dummy);
    Ok(records)
}

/// Calls with the same key are the same call with other values.
fn key(record: &OpRecord, context: usize) -> String {
    let context = if matches!(record.op, "attention" | "decode_attention") { context } else { 0 };
    let shapes: Vec<_> = record.reads.iter().chain(&record.writes).map(|o| (&o.shape, o.dtype)).collect();
    format!("{} {context} {shapes:?}", record.op)
}

/// The operands that tell calls of one op apart.
fn shapes(record: &OpRecord) -> String {
    let shape = |o: &Operand| format!("{:?}", o.shape).replace(", ", ",");
    let reads: Vec<String> = record.reads.iter().take(2).map(shape).collect();
    let writes: Vec<String> = record.writes.iter().take(1).map(shape).collect();
    format!("{} -> {}", reads.join(" "), writes.join(" "))
}

/// One layer of Qwen3-4B: its other layers have the same shapes.
fn qwen3_4b() -> Config {
    Config {
        vocab_size: 151_936,
        hidden_size: 2560,
        intermediate_size: 9728,
        layers: 1,
        shape: pegainfer_kernels::ops::HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        max_position_embeddings: 40_960,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every op of a step has a comparison: the CPU agrees with itself.
    #[test]
    fn every_op_is_known() {
        let mut cpu = Exec::cpu(Isa::best(), Some(2)).unwrap();
        let mut portable = Exec::cpu(Isa::Portable, Some(2)).unwrap();
        let config = Config { layers: 1, ..Config::load(&crate::testing::model_dir()).unwrap() };
        let mut report = Report::default();
        for (batch, tokens, context) in [(3, 1, 20), (2, 3, 50)] {
            let case = Case { shape: config.shape, context, rope_theta: config.rope_theta };
            for record in records(&config, batch, tokens, context).unwrap() {
                report.op(&mut cpu, &mut portable, &record, &case).unwrap();
            }
        }
        assert_eq!(report.failed, 0);
    }
}
