//! Estimated step times of a card that was not measured: the time that its memory and its arithmetic need at least.

use crate::bench::peaks::Peaks;
use crate::cards::{self, CARDS, Card};
use crate::defaults::Defaults;
use crate::shipped::ShippedArgs;
use anyhow::{Context, Result, bail};
use clap::Parser;
use pegainfer_core::ledger::{Effort, GridLimits, Header, HostCost, Ledger, MeasureStep, measure};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_models::model_path::{self, ModelDir};
use pegainfer_runtime::Overrides;
use std::time::Duration;

/// Default of `--mixed-step-token-budget`.
const MIXED_TOKENS: usize = 512;
/// Steps in flight.
const DEPTH: usize = 2;

/// The least times of steps of a model on some cards.
pub struct Roofline<'a> {
    /// The model.
    pub model: &'a ModelDir,
    /// Formats of weights and KV cache.
    pub overrides: Overrides,
    /// Number of cards that share the model. Their messages take no time.
    pub ranks: usize,
    /// Rates of a card.
    pub peaks: Peaks,
}

impl Roofline<'_> {
    /// Microseconds of a step of `batch` rows of `context` tokens, the last `tokens` of them new. `None` if a rate is
    /// unknown.
    pub fn step_us(&self, batch: usize, tokens: usize, context: usize) -> Result<Option<f64>> {
        let (bytes, flops) = self.work(batch, tokens, context)?;
        Ok(self.peaks.floor_us(bytes, flops))
    }

    /// Bytes and floating-point operations of a step.
    fn work(&self, batch: usize, tokens: usize, context: usize) -> Result<(u64, u64)> {
        let step = (batch, tokens, context);
        let records = engine::record_rank(&self.model.dir, &self.overrides, self.ranks, step)?;
        Ok(records.iter().fold((0, 0), |sum, op| (sum.0 + op.bytes, sum.1 + op.flops)))
    }

    /// Work of a step with different rows: the sum of the work of equal ones, with the weights read once.
    fn work_of(&self, rows: &[(usize, usize)]) -> Result<(u64, u64)> {
        let mut groups: Vec<((usize, usize), usize)> = Vec::new();
        for row in rows {
            match groups.iter_mut().find(|(other, _)| other == row) {
                Some((_, count)) => *count += 1,
                None => groups.push((*row, 1)),
            }
        }
        let weights = self.work(1, 1, 1)?.0;
        let mut sum = (0, 0);
        for (i, ((tokens, context), batch)) in groups.into_iter().enumerate() {
            let (bytes, flops) = self.work(batch, tokens, context)?;
            sum = (sum.0 + if i == 0 { bytes } else { bytes.saturating_sub(weights) }, sum.1 + flops);
        }
        Ok(sum)
    }
}

impl MeasureStep for Roofline<'_> {
    fn run(&mut self, rows: &[(usize, usize)], _: usize) -> Result<Vec<Duration>, OpError> {
        let failed = |message: String| OpError { op: "roofline", message };
        let (bytes, flops) = self.work_of(rows).map_err(|error| failed(format!("{error:#}")))?;
        let us = self.peaks.floor_us(bytes, flops).ok_or_else(|| failed("the card's rates are unknown".into()))?;
        Ok(vec![Duration::from_nanos((us * 1e3) as u64)])
    }
}

/// A ledger of estimates for the model and the card, or cards such as `4090x2`, that the flags name.
pub fn ledger(shipped: &ShippedArgs) -> Result<Ledger> {
    let (Some(gpu), Some(name)) = (&shipped.gpu, &shipped.model) else {
        bail!("--roofline: give --gpu and --model, such as --gpu 4090 --model Qwen/Qwen3-8B");
    };
    let (card, ranks) = cards_named(gpu)?;
    let model = model_path::resolve_config(Some(name))?;
    let peaks = Peaks::given_or_datasheet(None, None, card.name);
    let engine = Defaults::try_parse_from(["sim"])?.engine;
    let engine = EngineArgs { tensor_parallel_size: ranks.try_into().ok(), ..engine };
    let fit = engine::gpu_fit(&model.dir, &engine, card.memory())
        .with_context(|| format!("{name} does not fit {gpu}: pegainfer fit says what does"))?;
    let mut roofline = Roofline { model: &model, overrides: engine.overrides(), ranks, peaks };
    let header = Header {
        version: Header::VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        kernels: "estimated".to_owned(),
        measured: None,
        model: name.clone(),
        device: if ranks == 1 { card.name.to_owned() } else { format!("{ranks} x {}", card.name) },
        ranks,
        driver: None,
        quantization: None,
        kv_cache_dtype: engine.overrides().kv_dtype.name().to_owned(),
        kv_blocks: fit.kv_tokens / BLOCK_SIZE,
        block_size: BLOCK_SIZE,
        max_model_len: fit.context,
        vocab_size: engine::vocab_size(&model.dir)?,
        max_num_seqs: fit.sequences,
        max_num_batched_tokens: fit.step_tokens,
        max_num_mixed_tokens: MIXED_TOKENS.min(fit.step_tokens),
        depth: DEPTH,
        graphs: true,
        state: None,
    };
    let limits = GridLimits {
        max_num_seqs: header.max_num_seqs,
        max_tokens: header.max_num_batched_tokens,
        mixed_tokens: header.max_num_mixed_tokens,
        max_context: header.max_model_len,
        kv_blocks: header.kv_blocks,
        block_size: header.block_size,
        graphs: header.graphs,
    };
    let effort = Effort { per_step: Duration::ZERO, refine: Duration::ZERO };
    let steps = measure(&mut roofline, &limits, effort, &mut |_| {})?;
    Ok(Ledger {
        header,
        host: HostCost::default(),
        config: None,
        steps,
        ops: Vec::new(),
        kernels: Vec::new(),
        anchor: None,
    })
}

/// The card and the number of them in `4090` or `4090x2`.
fn cards_named(name: &str) -> Result<(&'static Card, usize)> {
    let several = name.rsplit_once('x').and_then(|(card, count)| Some((cards::named(card)?, count.parse().ok()?)));
    let found = several.or_else(|| Some((cards::named(name)?, 1))).filter(|(_, count)| *count > 0);
    found.with_context(|| {
        let known: Vec<_> = CARDS.iter().map(|card| card.name).collect();
        format!("--gpu {name} is not known: give one of {}", known.join(", "))
    })
}

/// A sentence about the estimates.
pub fn warning(header: &Header) -> String {
    format!(
        "an estimate, not measured: each step takes the time that the memory and the arithmetic of {} need at least by their \
         datasheet, so that real times are longer; measure a card with pegainfer ledger",
        header.device
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped;
    use pegainfer_core::ledger::{StepKind, StepLoad};
    use pegainfer_testing::model_dir;

    fn estimate(gpu: &str, model: &str) -> Result<Ledger> {
        ledger(&ShippedArgs { gpu: Some(gpu.to_owned()), model: Some(model.to_owned()) })
    }

    #[test]
    fn an_estimate_covers_every_kind_of_step() {
        let tiny = model_dir().display().to_string();
        let ledger = estimate("4090", &tiny).unwrap();
        ledger.header.check().unwrap();
        let law = ledger.law().unwrap();
        let time = |rows: Vec<(usize, usize)>| {
            let time = law.time(&StepLoad::of_rows(rows));
            assert!(time.covered && time.us > 0.0);
            time.us
        };
        let (decode, prompt) = (time(vec![(1, 1024); 8]), time(vec![(256, 256)]));
        let mixed = time([vec![(1, 1024); 8], vec![(256, 256)]].concat());
        assert!(mixed >= decode.max(prompt) && mixed <= decode + prompt, "{mixed} of {decode} and {prompt}");
        for kind in StepKind::ALL {
            assert!(ledger.steps.iter().any(|line| line.load.kind() == kind), "{kind:?}");
        }
        let slower = estimate("3060", &tiny).unwrap().law().unwrap();
        assert!(slower.time(&StepLoad::of_rows([(1, 1024)])).us > law.time(&StepLoad::of_rows([(1, 1024)])).us);
    }

    #[test]
    fn measured_steps_take_longer_than_the_estimate() {
        let name = ShippedArgs { gpu: Some("h200".into()), model: Some("qwen3-4b".into()) };
        let measured = shipped::read(None, &name).unwrap();
        let model = model_path::from_config(measured.config.as_ref().unwrap(), "Qwen/Qwen3-4B").unwrap();
        let overrides = Defaults::try_parse_from(["sim"]).unwrap().engine.overrides();
        let roofline = Roofline { model: &model, overrides, ranks: 1, peaks: Peaks::from_datasheet("H200") };
        let law = measured.law().unwrap();
        for (batch, tokens, context, least) in
            [(1, 1, 1024, 0.6), (32, 1, 1024, 0.6), (256, 1, 1024, 0.6), (1, 1024, 1024, 0.5), (1, 8192, 8192, 0.5)]
        {
            let us = law.time(&StepLoad::of_rows(vec![(tokens, context); batch])).us;
            let part = roofline.step_us(batch, tokens, context).unwrap().unwrap() / us;
            assert!((least..1.0).contains(&part), "{batch} {tokens} {context}: {part}");
        }
    }

    #[test]
    fn several_cards_and_unknown_ones_are_told_apart() {
        let (card, count) = cards_named("RTX 4090x2").unwrap();
        assert_eq!((card.name, count), ("RTX 4090", 2));
        assert_eq!(cards_named("h200").unwrap().1, 1);
        for name in ["tpu", "4090x0", "x2"] {
            let error = cards_named(name).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--gpu {name} is not known: give one of B200, ")), "{error}");
        }
        let error = ledger(&ShippedArgs::default()).unwrap_err().to_string();
        assert!(error.starts_with("--roofline: give --gpu and --model"), "{error}");
    }
}
