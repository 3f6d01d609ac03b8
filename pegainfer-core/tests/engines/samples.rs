//! The token that a sample draws does not depend on the other samples.

use super::Target;
use super::invariance::DRIFT;
use pegainfer_core::schedule::{Outcome, SampleRow, SequenceState, Step, StepExecutor};

/// Runs `step`, which must not read its own results, with the samples that schedulers request, in an executor with
/// capacity for a sample of every token.
pub fn hold<E: StepExecutor>(target: Target, executor: &mut E, step: &Step<<E::State as SequenceState>::Row>) {
    let mut run = |tokens: &[u32]| -> Outcome {
        let sample = |&token: &u32| SampleRow { token, logprobs: Some(2), ..step.samples[0].clone() };
        let step = Step { samples: tokens.iter().map(sample).collect(), ..step.clone() };
        executor.launch(&step).unwrap();
        executor.sample(&step).unwrap();
        executor.finish().unwrap()
    };
    let all: Vec<u32> = (0..step.tokens.len() as u32).collect();
    let expected = run(&all);
    let ends: Vec<u32> = step.qo_indptr[1..].iter().map(|end| end - 1).collect();
    // Every row; interrupted rows, surrounded by others; none; reports of a part of a prompt, and of all of another.
    let (last, first) = (ends.len() - 1, ends[0] as usize);
    let reports = [&all[first / 3..first / 2], &ends[..1], &all[first + 1..]].concat();
    for tokens in [&ends[..], &ends[1..last], &ends[last..], &[], &reports] {
        let outcome = run(tokens);
        assert_eq!(outcome.tokens.len(), tokens.len());
        for (i, &token) in tokens.iter().enumerate() {
            let at = |outcome: &Outcome, i: usize| (outcome.tokens[i], outcome.logprobs[i].clone().unwrap());
            let ((id, found), (expected_id, expected)) = (at(&outcome, i), at(&expected, token as usize));
            let close = target == Target::Cuda && (found.logprob - expected.logprob).abs() < DRIFT;
            assert!(close || (id, &found) == (expected_id, &expected), "{token} of {tokens:?}: {found:?} {expected:?}");
        }
    }
}
