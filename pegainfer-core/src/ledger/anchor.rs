//! Corrects a ledger for another card of the same kind: a dozen of its steps are measured again, and each group of
//! steps is scaled by the median of measured over recorded time.

use super::grid::{AGAIN_SETTLE, GridLimits, MeasureStep, PER_STEP, blocks_of_rows};
use super::load::{StepKind, StepLine, StepLoad};
use crate::tensor::OpError;
use serde::{Deserialize, Serialize};

/// Maximum number of sequences in a small decode step, whose time is that of reading the weights.
const SMALL_DECODE: usize = 16;
/// Maximum number of KV tokens of a step that is measured again, because they are written first.
const MAX_KV_TOKENS: usize = 128 << 10;
/// Decode steps: sequences and context of each.
const DECODE: [(usize, usize); 7] = [(1, 256), (1, 1024), (8, 256), (8, 1024), (64, 256), (64, 1024), (256, 256)];
/// Prefill steps: tokens of the prompt. The largest comes first, to bring the clock to the level of the others.
const PREFILL: [usize; 3] = [8192, 2048, 512];
/// Mixed steps: decoding sequences, and tokens of the step.
const MIXED: [(usize, usize); 3] = [(128, 2048), (128, 512), (32, 512)];

/// Groups of steps with a common factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepGroup {
    /// Decode steps of up to 16 sequences.
    DecodeSmall,
    /// Decode steps of more.
    DecodeLarge,
    /// Steps of prompts.
    Prefill,
    /// Steps of both.
    Mixed,
}

impl StepGroup {
    /// All groups.
    pub const ALL: [Self; 4] = [Self::DecodeSmall, Self::DecodeLarge, Self::Prefill, Self::Mixed];

    /// The group of a step.
    pub fn of(load: &StepLoad) -> Self {
        match load.kind() {
            StepKind::Decode if load.decode_rows <= SMALL_DECODE => Self::DecodeSmall,
            StepKind::Decode => Self::DecodeLarge,
            StepKind::Prefill => Self::Prefill,
            StepKind::Mixed => Self::Mixed,
        }
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::DecodeSmall => "small decode",
            Self::DecodeLarge => "large decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
        }
    }
}

/// A step of a ledger that was measured again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Remeasured {
    /// Load of the step.
    #[serde(flatten)]
    pub load: StepLoad,
    /// Microseconds that the ledger has.
    pub ledger_us: f64,
    /// Microseconds now.
    pub us: f64,
}

impl Remeasured {
    /// Time now relative to that of the ledger.
    pub fn ratio(&self) -> f64 {
        self.us / self.ledger_us
    }
}

/// Corrections of a ledger for another card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Anchor {
    /// Name of the device on which the ledger was measured.
    pub ledger_device: String,
    /// Steps measured again.
    pub steps: Vec<Remeasured>,
}

impl Anchor {
    /// Chooses the steps of a ledger to measure again: those nearest to a fixed list, at most 13.
    pub fn choose(steps: &[StepLine]) -> Vec<StepLine> {
        let mut chosen: Vec<StepLine> = Vec::new();
        // The nearest step that can be run again, with sizes compared by their ratios.
        let mut add = |group: StepKind, distance: &dyn Fn(&StepLoad) -> f64| {
            let fits = |line: &&StepLine| {
                let load = &line.load;
                load.kind() == group && line.us > 0.0 && load.decode_kv <= MAX_KV_TOKENS && rows(load).is_some()
            };
            let nearest = steps.iter().filter(fits).min_by(|a, b| distance(&a.load).total_cmp(&distance(&b.load)));
            if let Some(line) = nearest.filter(|line| chosen.iter().all(|other| other.load != line.load)) {
                chosen.push(line.clone());
            }
        };
        let apart = |a: usize, b: usize| (a.max(1) as f64 / b as f64).ln().abs();
        for (rows, context) in DECODE {
            // The number of sequences matters most.
            add(StepKind::Decode, &|load| {
                100.0 * apart(load.decode_rows, rows) + apart(load.decode_kv / load.decode_rows, context)
            });
        }
        for tokens in PREFILL {
            // Without cached tokens: a prompt attends only to itself.
            let cached = |load: &StepLoad| load.pairs > (load.tokens() * (load.tokens() + 1) / 2) as u64;
            add(StepKind::Prefill, &|load| apart(load.tokens(), tokens) + if cached(load) { 100.0 } else { 0.0 });
        }
        for (rows, tokens) in MIXED {
            add(StepKind::Mixed, &|load| 2.0 * apart(load.decode_rows, rows) + apart(load.tokens(), tokens));
        }
        chosen
    }

    /// Factor of a group: the median ratio of its steps; 1 if none was measured.
    pub fn factor(&self, group: StepGroup) -> f64 {
        let ratios = |same: &dyn Fn(StepGroup) -> bool| -> Vec<f64> {
            self.steps.iter().filter(|step| same(StepGroup::of(&step.load))).map(Remeasured::ratio).collect()
        };
        let mut of_group = ratios(&|other| other == group);
        let decode = [StepGroup::DecodeSmall, StepGroup::DecodeLarge];
        if of_group.is_empty() && decode.contains(&group) {
            // A ledger of few sequences has only one of the two groups.
            of_group = ratios(&|other| decode.contains(&other));
        }
        median(of_group).unwrap_or(1.0)
    }

    /// The steps of the ledger, corrected for this card.
    pub fn scale(&self, steps: &[StepLine]) -> Vec<StepLine> {
        let factors = StepGroup::ALL.map(|group| self.factor(group));
        let factor = |load: &StepLoad| {
            let group = StepGroup::of(load);
            StepGroup::ALL.iter().position(|other| *other == group).map_or(1.0, |i| factors[i])
        };
        steps.iter().map(|line| StepLine { us: line.us * factor(&line.load), ..line.clone() }).collect()
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        _ if values.is_empty() => None,
        0 => Some(f64::midpoint(values[middle - 1], values[middle])),
        _ => Some(values[middle]),
    }
}

/// Rows of a step with this load, each with its new tokens and its context: decoding sequences of equal context and at
/// most one chunk. `None` for other loads.
pub fn rows(load: &StepLoad) -> Option<Vec<(usize, usize)>> {
    let context = load.decode_kv.checked_div(load.decode_rows).unwrap_or(0);
    let mut rows = vec![(1, context); load.decode_rows];
    let tokens = load.prefill_tokens;
    if load.prefill_rows == 1 && tokens > 1 {
        let below = (tokens * (tokens - 1) / 2) as u64;
        rows.push((tokens, ((load.pairs + below) / tokens as u64) as usize));
    }
    (StepLoad::of_rows(rows.iter().copied()) == *load).then_some(rows)
}

/// Measures `steps` of a ledger again.
pub fn measure_again(
    target: &mut dyn MeasureStep,
    limits: &GridLimits,
    steps: &[StepLine],
    progress: &mut dyn FnMut(&StepLine),
) -> Result<Vec<Remeasured>, OpError> {
    let mut again = Vec::new();
    for line in steps {
        let Some(rows) = rows(&line.load).filter(|rows| limits.holds(rows)) else { continue };
        let now = limits.time(target, &rows, (AGAIN_SETTLE, PER_STEP))?;
        progress(&now);
        again.push(Remeasured { load: line.load, ledger_us: line.us, us: now.us });
    }
    Ok(again)
}

/// KV blocks that the steps need, of `block_size` tokens each.
pub fn blocks_of(steps: &[StepLine], block_size: usize) -> usize {
    steps.iter().filter_map(|line| rows(&line.load)).map(|rows| blocks_of_rows(&rows, block_size)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::law::Law;
    use super::*;
    use std::time::Duration;

    fn line(rows: &[(usize, usize)], us: f64) -> StepLine {
        StepLine { load: StepLoad::of_rows(rows.iter().copied()), us, spread: 0.0, runs: 1 }
    }

    /// A grid like that of an H200.
    fn steps() -> Vec<StepLine> {
        let mut steps = Vec::new();
        for rows in [1, 2, 8, 16, 64, 128, 256] {
            for context in [16, 256, 1024, 4096] {
                steps.push(line(&vec![(1, context); rows], 2000.0 + (rows * context) as f64 / 100.0));
            }
        }
        for tokens in [2, 512, 1024, 2048, 8192] {
            for cached in [0, 4096] {
                steps.push(line(&[(tokens, tokens + cached)], 2000.0 + 10.0 * tokens as f64));
            }
            if tokens > 512 {
                steps.push(line(&vec![(512, 512); tokens / 512], 2000.0 + 9.0 * tokens as f64));
            }
        }
        for (decoding, tokens) in [(32, 512), (128, 512), (128, 2048), (255, 1024)] {
            let mut rows = vec![(1, 1024); decoding];
            rows.push((tokens - decoding, tokens - decoding));
            steps.push(line(&rows, 5000.0 + 10.0 * tokens as f64));
        }
        steps
    }

    /// A card on which decode steps take 1 % longer, prompts 8 % longer, and one step twice as long.
    struct OtherCard {
        ledger: Vec<StepLine>,
        largest: usize,
    }

    fn slower(load: &StepLoad) -> f64 {
        match load.kind() {
            _ if load.prefill_tokens == 512 => 2.0,
            StepKind::Decode => 1.01,
            _ => 1.08,
        }
    }

    impl MeasureStep for OtherCard {
        fn run(&mut self, rows: &[(usize, usize)], runs: usize) -> Result<Vec<Duration>, OpError> {
            self.largest = self.largest.max(rows.len() * rows.iter().map(|row| row.1).max().unwrap().div_ceil(16));
            let load = StepLoad::of_rows(rows.iter().copied());
            let line = self.ledger.iter().find(|line| line.load == load).unwrap();
            Ok(vec![Duration::from_secs_f64(line.us * slower(&load) / 1e6); runs])
        }
    }

    fn anchored() -> (Anchor, usize, usize) {
        let chosen = Anchor::choose(&steps());
        let blocks = blocks_of(&chosen, 16);
        let limits = GridLimits {
            max_num_seqs: 257,
            max_tokens: 8192,
            mixed_tokens: 512,
            max_context: 40_960,
            kv_blocks: blocks,
            block_size: 16,
            graphs: true,
        };
        let mut card = OtherCard { ledger: steps(), largest: 0 };
        let steps = measure_again(&mut card, &limits, &chosen, &mut |_| {}).unwrap();
        (Anchor { ledger_device: "cuda:0 (X)".into(), steps }, card.largest, blocks)
    }

    #[test]
    fn rows_are_those_of_the_load() {
        for rows in [vec![(1, 100); 3], vec![(7, 19)], vec![(1, 40), (1, 40), (9, 9)]] {
            assert_eq!(super::rows(&StepLoad::of_rows(rows.iter().copied())), Some(rows));
        }
        for other in [vec![(1, 3), (1, 4)], vec![(5, 5); 2]] {
            assert_eq!(super::rows(&StepLoad::of_rows(other.iter().copied())), None);
        }
    }

    #[test]
    fn steps_of_every_group_are_chosen_and_prompts_have_nothing_cached() {
        let chosen = Anchor::choose(&steps());
        assert_eq!(chosen.len(), 13);
        for (group, count) in StepGroup::ALL.into_iter().zip([4, 3, 3, 3]) {
            assert_eq!(chosen.iter().filter(|line| StepGroup::of(&line.load) == group).count(), count, "{group:?}");
        }
        let prompts = chosen.iter().filter(|line| line.load.kind() == StepKind::Prefill);
        let sizes: Vec<_> = prompts.map(|line| (line.load.tokens(), line.load.pairs)).collect();
        assert_eq!(sizes, [(8192, 8192 * 8193 / 2), (2048, 2048 * 2049 / 2), (512, 512 * 513 / 2)]);
        assert!(Anchor::choose(&[]).is_empty());
    }

    #[test]
    fn factors_are_medians_and_scale_the_law() {
        let (anchor, largest, blocks) = anchored();
        assert_eq!(largest, blocks, "as many blocks as the largest step needs are written");
        let factors = StepGroup::ALL.map(|group| anchor.factor(group));
        for (factor, expected) in factors.into_iter().zip([1.01, 1.01, 1.08, 1.08]) {
            assert!((factor - expected).abs() < 1e-4, "{factors:?}: one step of twice the time is an outlier");
        }
        let law = Law::new(&anchor.scale(&steps()), true).unwrap();
        for line in steps() {
            let (predicted, expected) = (law.time(&line.load).us, line.us * slower(&line.load).min(1.08));
            assert!((predicted / expected - 1.0).abs() < 0.02, "{line:?}: {predicted}, not {expected}");
        }
    }

    #[test]
    fn a_group_without_steps_takes_the_factor_of_its_kind() {
        let (anchor, ..) = anchored();
        let small = |step: &&Remeasured| StepGroup::of(&step.load) == StepGroup::DecodeSmall;
        let anchor = Anchor { steps: anchor.steps.iter().filter(small).cloned().collect(), ..anchor };
        assert!((anchor.factor(StepGroup::DecodeLarge) - 1.01).abs() < 1e-4);
        assert_eq!(anchor.factor(StepGroup::Mixed), 1.0);
    }
}
