//! Chooses the experts of each token.

use super::route_spec::RouteSpec;
use crate::cpu::moe::route as reference;
use crate::cuda;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Chooses the experts with the largest logits, largest first, of equal ones that with the lower number. Their weights
/// are `w[e] = exp(l[e]) / Σ exp(l)`, where the sum is over the chosen experts if `normalize`, else over all. The
/// shared expert, if there is one, comes last with the weight `1 / (1 + exp(-l[experts]))`.
///
/// `logits`: `[T, spec.rows()]` f32, whose columns after [`RouteSpec::count`] are not read; `chosen`: `[T,
/// spec.per_token()]` u32; `weights`: the same in f32. Computed in f32 (transformers `Qwen3MoeSparseMoeBlock` and
/// `Qwen3_5MoeSparseMoeBlock`, which round logits and weights to bf16). Whatever the logits are, the chosen numbers are
/// those of experts. A GPU takes up to 1,024 experts, of which it chooses up to 32.
pub fn route(
    exec: &mut Exec,
    logits: &Tensor,
    spec: RouteSpec,
    (chosen, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let check = Check("route");
    let (tokens, rows) = logits.rows_cols();
    check.is(logits, DType::F32, &[tokens, spec.rows()])?;
    check_choice(check, tokens, spec, (chosen, weights))?;
    exec.record(|_| OpRecord::new("route", "rows", &[logits], &[chosen, weights], 4 * logits.elements() as u64));
    if exec.device() == Device::Cuda {
        return cuda::moe::route(exec, logits, spec, (chosen, weights));
    }
    if matches!(exec.device(), Device::Cpu(_)) {
        let choices = chosen.host_mut::<u32>().chunks_exact_mut(spec.per_token());
        let choices = choices.zip(weights.host_mut::<f32>().chunks_exact_mut(spec.per_token()));
        for (logits, choice) in logits.host::<f32>().chunks_exact(rows).zip(choices) {
            reference::route(logits, spec, choice);
        }
    }
    Ok(())
}

/// Checks the results of the choice for so many tokens.
pub(super) fn check_choice(
    check: Check,
    tokens: usize,
    spec: RouteSpec,
    (chosen, weights): (&Tensor, &Tensor),
) -> Result<(), OpError> {
    check.is(chosen, DType::U32, &[tokens, spec.per_token()])?;
    check.is(weights, DType::F32, &[tokens, spec.per_token()])?;
    check.that((1..=spec.experts).contains(&spec.chosen), "a token chooses no expert, or more than there are")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;

    const SPEC: RouteSpec = RouteSpec { experts: 5, chosen: 2, normalize: true, shared: false };

    /// Experts and weights of one token.
    fn choose(logits: [f32; 8], spec: RouteSpec) -> (Vec<u32>, Vec<f32>) {
        let mut host = Host { exec: Exec::cpu(pegainfer_core::isa::Isa::best(), Some(1)).unwrap() };
        let mut tensor = host.zeros("logits", &[1, 8], DType::F32);
        tensor.host_mut::<f32>().copy_from_slice(&logits);
        let mut chosen = host.zeros("chosen", &[1, spec.per_token()], DType::U32);
        let mut weights = host.zeros("weights", &[1, spec.per_token()], DType::F32);
        route(&mut host.exec, &tensor, spec, (&mut chosen, &mut weights)).unwrap();
        (chosen.host().to_vec(), weights.host().to_vec())
    }

    #[track_caller]
    fn close(got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        got.iter().zip(expected).for_each(|(g, e)| assert!((f64::from(*g) - e).abs() < 1e-6, "{got:?} {expected:?}"));
    }

    #[test]
    fn weights_are_a_softmax_over_the_chosen_or_over_all() {
        let logits = [1.0, -2.0, 3.0, 0.5, 2.0, 99.0, 99.0, 99.0];
        let exp = |i: usize| f64::from(logits[i]).exp();
        let (chosen, weights) = choose(logits, SPEC);
        assert_eq!(chosen, [2, 4], "columns after the last expert are padding");
        close(&weights, &[exp(2) / (exp(2) + exp(4)), exp(4) / (exp(2) + exp(4))]);
        let (chosen, weights) = choose(logits, RouteSpec { normalize: false, ..SPEC });
        let all: f64 = (0..5).map(exp).sum();
        assert_eq!(chosen, [2, 4]);
        close(&weights, &[exp(2) / all, exp(4) / all]);
        // Large logits do not overflow.
        close(&choose(logits.map(|l| l + 1e4), SPEC).1, &[exp(2) / (exp(2) + exp(4)), exp(4) / (exp(2) + exp(4))]);
    }

    #[test]
    fn the_shared_expert_comes_last_with_a_gate_of_its_own() {
        let spec = RouteSpec { shared: true, ..SPEC };
        let (chosen, weights) = choose([1.0, -2.0, 3.0, 0.5, 2.0, -1.5, 99.0, 99.0], spec);
        let (two, four) = (3f64.exp(), 2f64.exp());
        assert_eq!(chosen, [2, 4, 5]);
        close(&weights, &[two / (two + four), four / (two + four), 1.0 / (1.0 + 1.5f64.exp())]);
    }

    #[test]
    fn equal_logits_go_to_lower_numbers_and_a_nan_stays_within_the_experts() {
        assert_eq!(choose([2.0; 8], SPEC).0, [0, 1]);
        assert_eq!(choose([1.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0, 0.0], SPEC).0, [1, 2]);
        let (chosen, weights) = choose([f32::NAN; 8], SPEC);
        assert!(chosen.iter().all(|e| *e < 5) && weights.iter().all(|w| w.is_nan()));
    }
}
