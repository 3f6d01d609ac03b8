//! Chooses the experts of each token.

use super::values::cpu;
use crate::cpu::deepseek_v4::route as reference;
use crate::cpu::moe::route::top_k;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Routing of a layer.
#[derive(Debug, Clone, Copy)]
pub enum Routing<'a> {
    /// By token id.
    Hash {
        /// `[vocab, k]` u32.
        table: &'a Tensor,
        /// `[T]` u32.
        ids: &'a Tensor,
    },
    /// The largest gates, a bias added for the choice alone.
    Learned {
        /// `[experts]` f32.
        bias: &'a Tensor,
    },
}

/// Constants of the routing.
#[derive(Debug, Clone, Copy)]
pub struct RoutingSpec {
    /// Sum of the weights of a token.
    pub scale: f32,
}

/// Chooses `k` experts per token and their weights: `g = sqrt(softplus(logits))`, the weights are `g / Σ g · scale`
/// over the chosen ones.
///
/// `logits`: `[T, experts]` f32; `experts`: `[T, k]` u32; `weights`: `[T, k]` f32. Gates are computed in f64 and
/// rounded to f32 once, so that every device chooses the same experts; the rest is f32. 1e-20 is added to the sum, so
/// that gates that are all 0 (possible in a hash row) give 0. Ties go to the lower expert.
pub fn route(
    exec: &mut Exec,
    logits: &Tensor,
    routing: Routing<'_>,
    spec: RoutingSpec,
    (experts, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let check = Check("route");
    let (tokens, count) = logits.rows_cols();
    let k = experts.rows_cols().1;
    check.is(logits, DType::F32, &[tokens, count])?;
    check.is(experts, DType::U32, &[tokens, k])?;
    check.is(weights, DType::F32, &[tokens, k])?;
    check.that(k <= count, "more experts requested than exist")?;
    let by = match routing {
        Routing::Hash { table, ids } => {
            check.is(table, DType::U32, &[table.rows_cols().0, k])?;
            check.is(ids, DType::U32, &[tokens])?;
            ids
        }
        Routing::Learned { bias } => {
            check.is(bias, DType::F32, &[count])?;
            bias
        }
    };
    exec.record(|_| OpRecord::new("route", "rows", &[logits, by], &[experts, weights], 4 * logits.elements() as u64));
    if exec.device() == Device::Cuda {
        return match routing {
            Routing::Hash { table, ids } => gpu::route_hash(exec, logits, (table, ids), spec.scale, (experts, weights)),
            Routing::Learned { bias } => gpu::route_learned(exec, logits, bias, spec.scale, (experts, weights)),
        };
    }
    if cpu(check, exec)?.is_none() {
        return Ok(());
    }
    let chosen = experts.host_mut::<u32>();
    let rows = logits.host::<f32>().chunks_exact(count).zip(chosen.chunks_exact_mut(k));
    for (t, ((logits, chosen), weights)) in rows.zip(weights.host_mut::<f32>().chunks_exact_mut(k)).enumerate() {
        let gates: Vec<f32> = logits.iter().map(|l| reference::gate(*l)).collect();
        match routing {
            Routing::Hash { table, ids } => {
                let row = table.host::<u32>().chunks_exact(k).nth(ids.host::<u32>()[t] as usize);
                let Some(row) = row else { return check.that(false, "a token has no row in the hash table") };
                check.that(row.iter().all(|e| (*e as usize) < count), "the hash table names an unknown expert")?;
                chosen.copy_from_slice(row);
            }
            Routing::Learned { bias } => {
                let biased: Vec<f32> = gates.iter().zip(bias.host::<f32>()).map(|(g, b)| g + b).collect();
                top_k(&biased, k, chosen);
            }
        }
        weights.iter_mut().zip(chosen).for_each(|(w, e)| *w = gates[*e as usize]);
        reference::normalize(weights, spec.scale);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;

    fn f32s(host: &mut Host, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = host.zeros("f32s", shape, DType::F32);
        tensor.host_mut::<f32>().copy_from_slice(values);
        tensor
    }

    #[test]
    fn trap_11_softplus_has_a_threshold_and_no_row_is_nan() {
        for x in [-100.0f32, -5.0, 0.0, 3.0, 19.9, 20.1, 88.0, 1000.0] {
            let exact = if x > 700.0 { f64::from(x) } else { f64::from(x).exp().ln_1p() }.sqrt();
            assert!((f64::from(reference::gate(x)) - exact).abs() <= 1e-6 * exact.max(1e-12), "{x}");
        }
        Host::each(|mut host| {
            let logits = f32s(&mut host, &[1, 3], &[-1000.0, -1000.0, 0.0]);
            let mut table = host.zeros("table", &[5, 2], DType::U32);
            table.host_mut::<u32>()[8..].copy_from_slice(&[1, 0]);
            let ids = host.u32("ids", &[4]);
            let (mut experts, mut weights) =
                (host.zeros("e", &[1, 2], DType::U32), host.zeros("w", &[1, 2], DType::F32));
            let routing = Routing::Hash { table: &table, ids: &ids };
            let spec = RoutingSpec { scale: 1.5 };
            route(&mut host.exec, &logits, routing, spec, (&mut experts, &mut weights)).unwrap();
            assert_eq!((experts.host::<u32>(), weights.host::<f32>()), (&[1, 0][..], &[0.0, 0.0][..]));
        });
    }

    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        Host::each(|mut host| {
            let logits = f32s(&mut host, &[2, 4], &[1.0, 2.0, 3.0, 0.0, 5.0, 5.0, 5.0, 5.0]);
            let bias = f32s(&mut host, &[4], &[0.0, 0.0, -9.0, 0.0]);
            let (mut experts, mut weights) =
                (host.zeros("e", &[2, 2], DType::U32), host.zeros("w", &[2, 2], DType::F32));
            let (routing, spec) = (Routing::Learned { bias: &bias }, RoutingSpec { scale: 1.5 });
            route(&mut host.exec, &logits, routing, spec, (&mut experts, &mut weights)).unwrap();
            assert_eq!(experts.host::<u32>(), [1, 0, 0, 1], "ties go to the lower expert");
            let (a, b) = (reference::gate(2.0), reference::gate(1.0));
            let w = weights.host::<f32>();
            assert!((w[0] - a / (a + b) * 1.5).abs() < 1e-6 && (w[0] + w[1] - 1.5).abs() < 1e-6 && w[2] == 0.75);
        });
    }
}
