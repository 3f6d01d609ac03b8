//! A mixture of experts as the MLP of a layer (Qwen3-MoE, Qwen3.5-MoE).

use super::decoder::DecoderShape;
use super::mlp_scratch::MlpScratch;
use super::moe_shape::MoeShape;
use super::quantization::{Quantization, load_projection};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops;
use pegainfer_kernels::ops::moe::{Experts, RouteSpec};
use std::ops::Range;

/// Weights of a mixture of experts.
#[derive(Debug)]
pub struct Moe {
    /// Rows of the router, then of the gate of the shared expert, then zeros, `[route.rows(), hidden]` bf16.
    pub router: Tensor,
    /// The experts; a shared one comes last.
    pub experts: Experts,
    route: RouteSpec,
    /// Number of the layer among those with experts.
    layer: usize,
}

/// The tensors of the experts of a layer.
struct Names<'a> {
    prefix: &'a str,
    shape: MoeShape,
    hidden: usize,
    /// Width of an expert in the checkpoint.
    stored: usize,
    /// The rank's share of it.
    own: Range<usize>,
    quantization: Option<&'a Quantization>,
}

impl Moe {
    /// Loads layer number `layer` of those with experts: `mlp.gate`, the experts, and `mlp.shared_expert` with its gate
    /// if there is one.
    pub(super) fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        (layer, moe): (usize, MoeShape),
        shape: &DecoderShape,
        quantization: Option<&Quantization>,
    ) -> Result<Self, WeightsError> {
        let (route, hidden, stored) = (moe.route, shape.hidden, moe.width * shape.shard.ranks);
        let names = Names { prefix, shape: moe, hidden, stored, own: shape.shard.part(stored), quantization };
        let rows = names.router();
        let mut router = loader.stacked(&rows[0].name, &rows, hidden)?;
        if moe.skewed {
            loader.scale_dummy(&rows[0].name, 0..1, moe.skew_gain(), &mut router)?;
        }
        let gate_up = names.gate_up(loader)?;
        let down = names.down(loader)?;
        let columns = Columns { stored, part: names.own.clone() };
        let title = |tail: &str| format!("{prefix}.mlp.experts.{tail}");
        let gate_up = load_projection(loader, quantization, &title("gate_up_proj"), &gate_up, hidden)?;
        let down = load_projection(loader, quantization, &title("down_proj"), &down, columns)?;
        Ok(Self {
            router,
            experts: Experts { gate_up, down, count: route.count(), shared: route.shared },
            route,
            layer,
        })
    }

    /// Adds up the outputs of the experts of each token, from `normed`, `[tokens, hidden]` bf16, to `out`, the same.
    pub(super) fn forward(
        &self,
        exec: &mut Exec,
        normed: &Tensor,
        scratch: &mut MlpScratch,
        out: &mut Tensor,
    ) -> Result<(), OpError> {
        let MlpScratch { logits, chosen, weights, .. } = scratch;
        let chosen = chosen.of_layer(self.layer, normed.rows_cols().0);
        ops::moe::router(exec, normed, &self.router, self.route, logits, (&mut *chosen, weights))?;
        ops::moe::experts(exec, normed, (chosen, weights), &self.experts, out)
    }
}

impl Names<'_> {
    fn name(&self, tail: &str) -> String {
        format!("{}.mlp.{tail}", self.prefix)
    }

    fn router(&self) -> Vec<SourceTensor> {
        let route = self.shape.route;
        let mut rows = vec![SourceTensor::whole(self.name("gate.weight"), route.experts)];
        if route.shared {
            rows.push(SourceTensor::whole(self.name("shared_expert_gate.weight"), 1));
        }
        let padding = route.rows() - route.count();
        if padding > 0 {
            rows.push(SourceTensor::zeros(padding));
        }
        rows
    }

    /// The name of a tensor of all routed experts, if the checkpoint has it. Its shape in safetensors is `[experts, shape]`;
    /// in GGUF the rows of all experts follow each other, `[experts * shape[0], shape[1]]`.
    fn stack(&self, loader: &Loader<'_>, tail: &str, shape: [usize; 2]) -> Result<Option<String>, WeightsError> {
        let (name, experts) = (self.name(&format!("experts.{tail}")), self.shape.route.experts);
        let (expected, rows) = ([experts, shape[0], shape[1]], [experts * shape[0], shape[1]]);
        match loader.stored_shape(&name) {
            // Without a checkpoint, only the formats of its tensors are known.
            None => Ok(self.quantization.is_some_and(|quantization| quantization.is_stored(&name)).then_some(name)),
            Some(found) if *found == expected || *found == rows => Ok(Some(name)),
            Some(found) => {
                Err(WeightsError::Mismatch { name, found: format!("{found:?}"), expected: format!("{expected:?}") })
            }
        }
    }

    /// `part` of `rows` rows of matrix number `e` of a stack of one for each routed expert.
    fn of_stack(&self, name: &str, e: usize, rows: usize, part: Range<usize>) -> SourceTensor {
        let part = e * rows + part.start..e * rows + part.end;
        SourceTensor { name: name.to_owned(), rows: self.shape.route.experts * rows, part }
    }

    /// For each expert the rank's rows of its gate, then those of `up`.
    fn gate_up(&self, loader: &Loader<'_>) -> Result<Vec<SourceTensor>, WeightsError> {
        let (stored, own, experts) = (self.stored, self.own.clone(), self.shape.route.experts);
        let separate = |expert: &str| {
            ["gate_proj", "up_proj"].map(|tail| SourceTensor {
                name: format!("{}.{tail}.weight", self.name(expert)),
                rows: stored,
                part: own.clone(),
            })
        };
        let fused = self.stack(loader, "gate_up_proj", [2 * stored, self.hidden])?;
        let stack = |tail| self.stack(loader, tail, [stored, self.hidden]);
        let stacks = (stack("gate_proj.weight")?, stack("up_proj.weight")?);
        let mut parts: Vec<SourceTensor> = match (&fused, &stacks) {
            // All rows as one part.
            (Some(name), _) if own.len() == stored => vec![SourceTensor::whole(name.clone(), experts * 2 * stored)],
            (Some(name), _) => {
                let halves = [own.clone(), stored + own.start..stored + own.end];
                let of = |e: usize| halves.clone().map(|part| self.of_stack(name, e, 2 * stored, part));
                (0..experts).flat_map(of).collect()
            }
            (None, (Some(gate), Some(up))) => {
                let of = |e: usize| [gate, up].map(|name| self.of_stack(name, e, stored, own.clone()));
                (0..experts).flat_map(of).collect()
            }
            _ => (0..experts).flat_map(|e| separate(&format!("experts.{e}"))).collect(),
        };
        if self.shape.route.shared {
            parts.extend(separate("shared_expert"));
        }
        Ok(parts)
    }

    /// All rows of each expert's last matrix.
    fn down(&self, loader: &Loader<'_>) -> Result<Vec<SourceTensor>, WeightsError> {
        let (hidden, experts) = (self.hidden, self.shape.route.experts);
        let separate = |expert: &str| {
            let name = format!("{}.down_proj.weight", self.name(expert));
            SourceTensor::whole(name, hidden)
        };
        let stack = |tail| self.stack(loader, tail, [hidden, self.stored]);
        let mut parts = match stack("down_proj")?.or(stack("down_proj.weight")?) {
            Some(name) => vec![SourceTensor::whole(name, experts * hidden)],
            None => (0..experts).map(|e| separate(&format!("experts.{e}"))).collect(),
        };
        parts.extend(self.shape.route.shared.then(|| separate("shared_expert")));
        Ok(parts)
    }
}
