//! Step times as a function of the load.
//!
//! With R decoding sequences, K KV tokens that they attend to, T tokens of the step and P query-key pairs of prefill
//! chunks:
//!
//! ```text
//! decode   t = D(R, K)
//! prefill  t = F(T, P)
//! mixed    t = F(T, P) + D(R, K) - D(R, 0) + m(R, T)
//! ```
//!
//! D, F and m are interpolated between measured steps. D has classes if decode steps are padded to the sizes of CUDA
//! graphs. The second and third terms of a mixed step are the attention of its decoding sequences; their other ops are
//! part of F's T tokens. `m`, zero without decoding sequences, is the measured rest: prefill and decode attention
//! overlap on a GPU, and a recurrent state is read and written for each sequence.

use super::load::{StepKind, StepLine, StepLoad};
use super::surface::Surface;
use thiserror::Error;

/// Predicts step times.
#[derive(Debug, Clone)]
pub struct Law {
    decode: Surface,
    prefill: Surface,
    /// Measured time minus the sum of the parts, over decoding sequences and tokens; empty if no mixed step was
    /// measured.
    mixed: Surface,
}

/// A predicted step time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Microseconds.
    pub us: f64,
    /// True if the step is within the measured range; otherwise the law was extrapolated.
    pub covered: bool,
}

/// Prediction error on a held-out step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Residual {
    /// The step.
    pub load: StepLoad,
    /// Measured microseconds.
    pub measured: f64,
    /// Predicted microseconds.
    pub predicted: f64,
}

impl Residual {
    /// `predicted / measured - 1`.
    pub fn relative(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// The measurements are not enough for a law.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the ledger has no {} steps: measure it again with pegainfer ledger", .0.name())]
pub struct LawError(pub StepKind);

impl Law {
    /// The law of measured steps. `graphs`: decode steps are padded to the measured numbers of sequences.
    pub fn new(steps: &[StepLine], graphs: bool) -> Result<Self, LawError> {
        let mut law = Self { decode: Surface::new(graphs), prefill: Surface::new(false), mixed: Surface::new(false) };
        let of = |kind| steps.iter().filter(move |line| line.load.kind() == kind);
        for line in of(StepKind::Decode) {
            law.decode.add(line.load.decode_rows as f64, line.load.decode_kv as f64, line.us);
        }
        for line in of(StepKind::Prefill) {
            law.prefill.add(line.load.tokens() as f64, line.load.pairs as f64, line.us);
        }
        // A step time of zero tokens shows whether there is anything to interpolate.
        law.decode.at(1.0, 0.0).ok_or(LawError(StepKind::Decode))?;
        law.prefill.at(1.0, 0.0).ok_or(LawError(StepKind::Prefill))?;
        for line in of(StepKind::Mixed) {
            let (rows, tokens) = (line.load.decode_rows as f64, line.load.tokens() as f64);
            law.mixed.add(0.0, tokens, 0.0);
            law.mixed.add(rows, tokens, line.us - law.sum(&line.load));
        }
        Ok(law)
    }

    /// The time of a step.
    pub fn time(&self, load: &StepLoad) -> Prediction {
        let (rows, kv) = (load.decode_rows as f64, load.decode_kv as f64);
        let (tokens, pairs) = (load.tokens() as f64, load.pairs as f64);
        let (us, covered) = match load.kind() {
            StepKind::Decode => (self.decode.at(rows, kv), self.decode.covers(rows, kv)),
            StepKind::Prefill => (self.prefill.at(tokens, pairs), self.prefill.covers(tokens, pairs)),
            StepKind::Mixed => {
                let beyond = self.mixed.within(rows, tokens);
                let covered = self.prefill.covers(tokens, pairs) && self.decode.covers(rows, kv);
                (Some(self.sum(load) + beyond.unwrap_or(0.0)), covered && beyond.is_some())
            }
        };
        // Both surfaces have points: checked by `new`.
        Prediction { us: us.unwrap_or(0.0).max(0.0), covered }
    }

    /// Sum of the parts of a mixed step.
    fn sum(&self, load: &StepLoad) -> f64 {
        let rows = load.decode_rows as f64;
        let decode = |kv| self.decode.at(rows, kv).unwrap_or(0.0);
        let attention = decode(load.decode_kv as f64) - decode(0.0);
        let prefill = self.prefill.at(load.tokens() as f64, load.pairs as f64).unwrap_or(0.0);
        prefill + attention.max(0.0)
    }

    /// Prediction error at each measured step when the steps of its size are held out (cross-validation), that is,
    /// those with as many decoding sequences or as many tokens. If decode steps have classes, only the step itself is
    /// held out. The smallest and the largest size are skipped, because they have no neighbours to interpolate between.
    pub fn residuals(steps: &[StepLine], graphs: bool) -> Vec<Residual> {
        let mut residuals = Vec::new();
        for line in steps {
            let classes = graphs && line.load.kind() == StepKind::Decode;
            let same_kind = |other: &&StepLine| other.load.kind() == line.load.kind();
            let left_out = |other: &StepLine| if classes { other == line } else { size(other) == size(line) };
            let others: Vec<StepLine> =
                steps.iter().filter(|other| !(same_kind(other) && left_out(other))).cloned().collect();
            let neighbours = || others.iter().filter(same_kind).filter(|o| !classes || size(o) == size(line));
            let place = |line: &StepLine| if classes { line.load.decode_kv } else { size(line) };
            let (below, above) = (|o: &StepLine| place(o) < place(line), |o: &StepLine| place(o) > place(line));
            if !neighbours().any(below) || !neighbours().any(above) {
                continue;
            }
            if let Ok(law) = Self::new(&others, graphs) {
                let predicted = law.time(&line.load).us;
                residuals.push(Residual { load: line.load, measured: line.us, predicted });
            }
        }
        residuals
    }
}

/// Number of decoding sequences, or of tokens for steps with chunks: the variable of interpolation.
fn size(line: &StepLine) -> usize {
    match line.load.kind() {
        StepKind::Decode => line.load.decode_rows,
        _ => line.load.tokens(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(rows: &[(usize, usize)], us: f64) -> StepLine {
        StepLine { load: StepLoad::of_rows(rows.iter().copied()), us, spread: 0.0, runs: 1 }
    }

    /// Steps of a device that takes 100 us, plus 2 us per token, 0.01 us per KV token and 0.001 us per pair.
    fn steps() -> Vec<StepLine> {
        let time = |rows: &[(usize, usize)]| {
            let load = StepLoad::of_rows(rows.iter().copied());
            let attention = load.decode_kv as f64 * 0.01 + load.pairs as f64 * 0.001;
            let overlap = if load.kind() == StepKind::Mixed { 0.9 } else { 1.0 };
            line(rows, (100.0 + 2.0 * load.tokens() as f64 + attention) * overlap)
        };
        let mut steps = Vec::new();
        for rows in [1, 4, 16] {
            for context in [1, 1000] {
                steps.push(time(&vec![(1, context); rows]));
            }
        }
        for tokens in [2, 64, 256, 512] {
            for cached in [0, 1000] {
                steps.push(time(&[(tokens, cached + tokens)]));
            }
        }
        steps
    }

    #[test]
    fn the_law_of_a_linear_device_is_exact() {
        let law = Law::new(&steps(), false).unwrap();
        let check = |rows: &[(usize, usize)], us: f64| {
            let predicted = law.time(&StepLoad::of_rows(rows.iter().copied()));
            assert!((predicted.us / us - 1.0).abs() < 1e-9, "{rows:?}: {predicted:?}, not {us}");
            predicted.covered
        };
        assert!(check(&[(1, 500); 8], 100.0 + 16.0 + 40.0));
        assert!(check(&[(1, 900), (1, 100)], 100.0 + 4.0 + 10.0));
        assert!(check(&[(100, 100)], 100.0 + 200.0 + 5.05));
        assert!(!check(&[(1, 100); 32], 100.0 + 64.0 + 32.0), "more sequences than were measured");
        assert!(!check(&[(1024, 1024)], 100.0 + 2048.0 + 524.8), "more tokens than were measured");
        // Without measured mixed steps the parts are added up.
        let mixed = [(1, 500), (1, 500), (62, 62)];
        assert!(!check(&mixed, 100.0 + 128.0 + 10.0 + 1.953));
    }

    #[test]
    fn mixed_steps_take_what_was_measured_beyond_their_parts() {
        let mut lines = steps();
        let rows = [(1, 500), (1, 500), (62, 62)];
        lines.push(line(&rows, 150.0));
        let law = Law::new(&lines, false).unwrap();
        let predicted = law.time(&StepLoad::of_rows(rows));
        assert!((predicted.us - 150.0).abs() < 1e-9 && predicted.covered, "{predicted:?}");
        // Half of it with half as many decoding sequences; the parts are 239.953 us.
        let beyond = law.time(&StepLoad::of_rows([(1, 500), (63, 63)])).us - (100.0 + 128.0 + 5.0 + 2.016);
        assert!((beyond - (150.0 - 239.953) / 2.0).abs() < 1e-6, "{beyond}");
    }

    #[test]
    fn padded_decode_steps_cost_what_the_next_graph_does() {
        let law = Law::new(&steps(), true).unwrap();
        let us = |rows: usize| law.time(&StepLoad::of_rows(vec![(1, 1); rows])).us;
        assert!((us(5) - us(16)).abs() < 0.2, "{} {}", us(5), us(16));
        assert!((us(2) - us(4)).abs() < 0.2 && us(4) < us(5));
    }

    #[test]
    fn residuals_are_those_of_steps_that_were_left_out() {
        let exact = Law::residuals(&steps(), false);
        assert_eq!(exact.len(), 6, "those of 4 sequences, and of 64 and 256 tokens");
        assert!(exact.iter().all(|r| r.relative().abs() < 1e-9), "{exact:?}");
        assert!(Law::residuals(&steps(), true).len() == 4, "two contexts have none between them");
        let mut lines = steps();
        let middle = lines.iter_mut().find(|line| line.load.tokens() == 64).unwrap();
        middle.us *= 1.5;
        let worst = Law::residuals(&lines, false).into_iter().map(|r| r.relative().abs()).fold(0.0, f64::max);
        assert!(worst > 0.2, "{worst}");
    }

    #[test]
    fn a_ledger_without_prompts_is_refused() {
        let decode: Vec<StepLine> = steps().into_iter().filter(|l| l.load.kind() == StepKind::Decode).collect();
        let error = Law::new(&decode, false).unwrap_err();
        assert_eq!(error, LawError(StepKind::Prefill));
        assert!(error.to_string().contains("no prefill steps"), "{error}");
    }
}
