//! Activations of a decoder, allocated once for the largest step, and the ops between its token mixers.

use super::bounds::StepSize;
use super::chosen_experts::ChosenExperts;
use super::decoder::DecoderShape;
use super::lora::{Adapters, Projection, adapted_linear};
use super::mlp::{Mlp, MlpKind};
use super::mlp_scratch::MlpScratch;
use super::sampled_rows::gather_rows;
use pegainfer_core::exec::{AliasedTensor, Exec};
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, Activation, ActivationMut, Matrix};

/// The activations of a step of a decoder.
#[derive(Debug)]
pub struct DecoderWorkspace {
    /// Activations around the token mixers.
    pub activations: Activations,
    /// Activations of full attention.
    pub attention: AttentionScratch,
}

/// Activations around the token mixer of each layer, bf16 unless noted otherwise.
#[derive(Debug)]
pub struct Activations {
    /// The residual stream, `[tokens, hidden]`.
    pub residual: Tensor,
    /// The normalised residual stream, input of the projections, `[tokens, hidden]` in bf16 or FP8.
    pub normed: Activation,
    /// Scratch for the output of a block before it is added to the residual, `[tokens, hidden]`.
    pub delta: Tensor,
    /// Scratch of the MLP.
    pub mlp: MlpScratch,
}

/// Activations of a layer of full attention, bf16 unless noted otherwise.
#[derive(Debug)]
pub struct AttentionScratch {
    /// Rotary angles, written at allocation; see [`ops::rope_table`].
    pub rope: Tensor,
    /// Output of the fused projection, `[tokens, qkv_width]`.
    pub qkv: Tensor,
    /// Scratch for the sampled rows of `qkv`, with gates only.
    pub sampled_qkv: Option<Tensor>,
    /// `[tokens, heads * head_dim]`.
    pub q: Tensor,
    /// `[tokens, heads * head_dim]` in bf16 or FP8.
    pub attended: Activation,
}

impl DecoderWorkspace {
    /// Activations for steps of this size, and `N` scratch tensors for the model's other token mixers. Mixers and the
    /// MLP run one at a time, so their scratch aliases one buffer.
    pub fn new<const N: usize>(
        exec: &mut Exec,
        shape: &DecoderShape,
        size: StepSize,
        mixers: [AliasedTensor<'_>; N],
    ) -> std::io::Result<(Self, [Tensor; N])> {
        let rope = ops::rope_table(exec, size.context, shape.rotary_dim, shape.rope)?;
        let mut wide = |name: &str| exec.tensor(name, &[size.tokens, shape.hidden], DType::Bf16);
        let (residual, normed, delta) = (wide("residual")?, wide("normed")?, wide("delta")?);
        let bf16 = |name, width| (name, [size.tokens, width], DType::Bf16);
        let (qkv_width, q_width) = (shape.qkv_width(), shape.heads.q_width());
        let mut attention = vec![bf16("qkv", qkv_width)];
        if shape.gated {
            attention.push(bf16("sampled_qkv", qkv_width));
        }
        attention.extend([bf16("q", q_width), bf16("attended", q_width)]);
        let dense = [bf16("gate_up", 2 * shape.intermediate), bf16("activated", shape.intermediate)];
        let (logits, per_token) = shape.moe.map_or((0, 0), |moe| (moe.route.rows(), moe.route.per_token()));
        let moe = [("logits", [size.tokens, logits], DType::F32), ("weights", [size.tokens, per_token], DType::F32)];
        let mut tensors = exec.aliased(&[&mixers, &attention, &dense, &moe])?;
        let [logits, weights] = array(tensors.split_off(N + attention.len() + dense.len()))?;
        let [gate_up, activated] = array(tensors.split_off(N + attention.len()))?;
        let [q, attended] = array(tensors.split_off(N + attention.len() - 2))?;
        let sampled_qkv = if shape.gated { tensors.pop() } else { None };
        let [qkv] = array(tensors.split_off(N))?;
        let (normed, activated) = (Activation::new(normed), Activation::new(activated));
        let chosen = ChosenExperts::new(exec, shape.moe.map_or(0, |moe| moe.layers), size.tokens, per_token)?;
        let mlp = MlpScratch { gate_up, activated, logits, chosen, weights };
        let activations = Activations { residual, normed, delta, mlp };
        let attention = AttentionScratch { rope, qkv, sampled_qkv, q, attended: Activation::new(attended) };
        Ok((Self { activations, attention }, array(tensors)?))
    }

    /// Sets all tensors to `tokens` rows, in bf16.
    pub fn set_rows(&mut self, tokens: usize) {
        let Activations { residual, normed, delta, mlp } = &mut self.activations;
        let AttentionScratch { qkv, sampled_qkv, q, attended, .. } = &mut self.attention;
        for tensor in [residual, delta, qkv, q].into_iter().chain(sampled_qkv) {
            tensor.set_rows(tokens);
        }
        for activation in [normed, attended] {
            activation.set_rows(tokens);
        }
        mlp.set_rows(tokens);
    }

    /// Keeps `rows` (`[n]` u32) of the residual stream and of the queries with their gates, before attention.
    pub(super) fn gather_queries(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Activations { residual, delta, .. } = &mut self.activations;
        let AttentionScratch { qkv, sampled_qkv, q, attended, .. } = &mut self.attention;
        gather_rows(exec, rows, [(residual, delta), (q, attended.bf16())])?;
        if let Some(sampled_qkv) = sampled_qkv {
            gather_rows(exec, rows, [(qkv, sampled_qkv)])?;
        }
        self.set_rows(rows.elements());
        Ok(())
    }

    /// Keeps `rows` (`[n]` u32) of the residual stream and of the output of attention, in bf16.
    pub(super) fn gather_outputs(&mut self, exec: &mut Exec, rows: &Tensor) -> Result<(), OpError> {
        let Activations { residual, delta, .. } = &mut self.activations;
        let AttentionScratch { q, attended, .. } = &mut self.attention;
        gather_rows(exec, rows, [(residual, delta), (attended.bf16(), q)])?;
        self.set_rows(rows.elements());
        Ok(())
    }
}

impl Activations {
    /// Runs the rest of a layer after its token mixer. `mixed`, `[tokens, width]`, goes through the output projection
    /// `out`, `[hidden, width]`, and is added to the residual stream; then the output of the MLP is added. `normed`
    /// becomes the stream normalised by `next`: the weight of the next layer's input norm and the matrix that follows
    /// it, or the final norm and `None`. With several ranks, both GEMMs give parts that are summed over the ranks.
    pub fn finish_layer(
        &mut self,
        exec: &mut Exec,
        (mixed, out): (&Tensor, &Matrix),
        mlp: &Mlp,
        next: (&Tensor, Option<&Matrix>),
        eps: f32,
        (communicator, mut adapters): (Option<&dyn Communicator>, Option<&mut Adapters<'_>>),
    ) -> Result<(), OpError> {
        let Self { residual, normed, delta, mlp: scratch } = self;
        // Adapters read what the next projection reads, in bf16.
        let fused = communicator.is_none() && adapters.is_none();
        let (reader, next_reader) = if adapters.is_none() { (mlp.reader(), next.1) } else { (None, None) };
        let add_norm =
            |exec: &mut Exec, delta: &mut Tensor, residual: &mut Tensor, norm: &Tensor, to: ActivationMut<'_>| {
                match communicator {
                    None => ops::add_rms_norm(exec, delta, residual, norm, eps, to),
                    Some(communicator) => ops::reduce_add_norm(exec, communicator, delta, residual, norm, eps, to),
                }
            };
        let to = normed.input_of(reader);
        if fused {
            ops::linear_add_norm(exec, mixed, out, residual, &mlp.norm, eps, delta, to)?;
        } else {
            adapted_linear(exec, (mixed, out), Projection::Output, adapters.as_deref_mut(), delta)?;
            add_norm(exec, delta, residual, &mlp.norm, to)?;
        }
        match &mlp.kind {
            MlpKind::Moe(moe) => moe.forward(exec, normed, scratch, delta)?,
            MlpKind::Dense(mlp) => {
                mlp.activate(exec, normed, scratch, adapters.as_deref_mut())?;
                let (activated, down) = (&scratch.activated, &mlp.down);
                if fused {
                    let to = normed.input_of(next_reader);
                    return ops::linear_add_norm(exec, activated, down, residual, next.0, eps, delta, to);
                }
                adapted_linear(exec, (activated, down), Projection::Down, adapters, delta)?;
            }
        }
        add_norm(exec, delta, residual, next.0, normed.input_of(next_reader))
    }
}

fn array<const N: usize>(tensors: Vec<Tensor>) -> std::io::Result<[Tensor; N]> {
    let wrong = |tensors: Vec<Tensor>| std::io::Error::other(format!("{} tensors for {N} names", tensors.len()));
    tensors.try_into().map_err(wrong)
}
