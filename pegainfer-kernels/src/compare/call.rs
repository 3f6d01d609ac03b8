//! A recorded call with its operands on one device, and the functions of a family of ops.

use super::batch::Tables;
use super::case::{Case, Output, Values};
use super::expert_weights::{self, BEFORE_WEIGHTS};
use super::fp8;
use super::operands::{self, allocate, place_of_input, tensor};
use super::variant::Variant;
#[cfg(feature = "deepseek-v4")]
use crate::ops::deepseek_v4::{CompressorWeights, HyperWeights, RingTable, RopeTable};
use crate::ops::moe::Experts;
use crate::ops::{DecodeState, Matrix, MatrixRef};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Factor of the tolerance of a GEMM with FP8 weights: Hopper sums FP8 less exactly than bf16, so more results round
/// differently before norms and gates.
const FP8_ROUNDINGS: f64 = 4.0;

/// A call: its op and its read-only operands, shared by launches.
pub(super) struct Call<'a> {
    pub record: &'a OpRecord,
    pub case: &'a Case,
    pub variant: Variant,
    /// Tensors that it reads; a small one stands for a weight in FP8.
    pub read: Vec<Tensor>,
    /// The weight in FP8.
    fp8: Option<Matrix>,
    /// The weights of `experts`.
    pub experts: Option<Experts>,
    family: &'static Family,
}

/// Outputs of one launch, and its operands that are not in the record. Launches without a wait in between need one
/// each.
#[derive(Default)]
pub(super) struct Launch {
    pub written: Vec<Tensor>,
    /// Workspaces and small inputs, in an order of the family's.
    pub extra: Vec<Tensor>,
    /// Tables of attention.
    pub tables: Option<Tables>,
    /// State of `decode_layers`.
    pub state: Option<DecodeState>,
    /// Weights of `hyper_mix`, `hyper_head` and `hyper_merge_mix_norm`.
    #[cfg(feature = "deepseek-v4")]
    pub hyper: Option<HyperWeights>,
    /// RoPE table of DeepSeek-V4's attention.
    #[cfg(feature = "deepseek-v4")]
    pub rope: Option<RopeTable>,
    /// Compressors of `attention_latents` and `attention_queries`.
    #[cfg(feature = "deepseek-v4")]
    pub compressors: Vec<CompressorWeights>,
    /// Addresses of the outputs of `copy_slots`.
    #[cfg(feature = "deepseek-v4")]
    pub rings: Option<RingTable>,
    /// Weights of DeepSeek-V4's GEMMs.
    #[cfg(feature = "deepseek-v4")]
    pub matrices: Vec<Matrix>,
}

/// Functions shared by the ops of one file.
pub(super) struct Family {
    /// True if the op belongs to this family.
    pub has: fn(&OpRecord) -> bool,
    /// The variants of a call.
    pub variants: fn(&OpRecord) -> Vec<Variant>,
    /// Allocates operands that are not in the record.
    pub prepare: fn(&mut Exec, &mut Call<'_>, &mut Launch) -> Result<(), OpError>,
    /// Fills it, and overwrites recorded operands that cannot be arbitrary.
    pub fill: fn(&mut Exec, &mut Call<'_>, &mut Launch, Values) -> Result<(), OpError>,
    /// Calls the op, and nothing else: it may be captured.
    pub launch: fn(&mut Exec, &Call<'_>, &mut Launch) -> Result<(), OpError>,
    /// Outputs to be compared.
    pub outputs: fn(&Exec, &Call<'_>, &Launch) -> Result<Vec<Output>, OpError>,
}

impl<'a> Call<'a> {
    /// Allocates and fills the inputs of an op of `family`.
    pub fn new(
        exec: &mut Exec,
        family: &'static Family,
        record: &'a OpRecord,
        case: &'a Case,
        variant: Variant,
    ) -> Result<Self, OpError> {
        let mut read = Vec::new();
        let weight = fp8::weight(record).unwrap_or_default();
        for (i, operand) in record.reads.iter().enumerate() {
            match i {
                1 if !weight.is_empty() => read.push(allocate(exec, "weight", &[1, 1], DType::U8)?),
                _ if i > 1 && i <= weight.len() => {}
                _ if i >= BEFORE_WEIGHTS && record.op == "experts" => {}
                _ => read.push(tensor(exec, operand, case, i as u64)?),
            }
        }
        let fp8 = (!weight.is_empty()).then(|| fp8::matrix(exec, weight)).transpose()?;
        let experts = expert_weights::weights(exec, record)?;
        for slots in read.iter_mut().filter(|tensor| tensor.name() == "slots") {
            variant.drop_slots(exec, slots)?;
        }
        Ok(Self { record, case, variant, read, fp8, experts, family })
    }

    /// The weight of a GEMM: `read`, unless it is FP8.
    pub fn weight<'w>(&'w self, read: &'w Tensor) -> MatrixRef<'w> {
        self.fp8.as_ref().map_or(read.into(), MatrixRef::from)
    }

    /// The operands of a launch, with `values`.
    pub fn prepare(&mut self, exec: &mut Exec, values: Values) -> Result<Launch, OpError> {
        let mut launch = Launch::default();
        for (i, operand) in self.record.writes.iter().enumerate() {
            launch.written.push(tensor(exec, operand, self.case, self.written_seed(i))?);
        }
        (self.family.prepare)(exec, self, &mut launch)?;
        self.fill_input(exec, &mut launch, values)?;
        (self.family.fill)(exec, self, &mut launch, values)?;
        Ok(launch)
    }

    /// Fills all inputs of a launch with `values`, and resets its outputs.
    pub fn refill(&mut self, exec: &mut Exec, launch: &mut Launch, values: Values) -> Result<(), OpError> {
        for (i, operand) in self.record.writes.iter().enumerate() {
            operands::fill(exec, &mut launch.written[i], operand, self.case, self.written_seed(i))?;
        }
        self.fill_input(exec, launch, values)?;
        (self.family.fill)(exec, self, launch, values)
    }

    /// Seed of output `i`; a tensor that is read and written starts with the values that are read.
    fn written_seed(&self, i: usize) -> u64 {
        let id = self.record.writes[i].id;
        self.record.reads.iter().position(|read| read.id == id).map_or(1 << 16, |read| read as u64)
    }

    /// Fills the activations, which the previous kernel of a step writes.
    fn fill_input(&mut self, exec: &mut Exec, launch: &mut Launch, values: Values) -> Result<(), OpError> {
        let Some(place) = place_of_input(self.record) else { return Ok(()) };
        let (operand, case) = (&self.record.reads[0], self.case);
        let tensor = place.tensor(&mut self.read, &mut launch.written);
        operands::fill(exec, tensor, operand, case, operands::input_seed(values))
    }

    /// Calls the op.
    pub fn launch(&self, exec: &mut Exec, launch: &mut Launch) -> Result<(), OpError> {
        (self.family.launch)(exec, self, launch)
    }

    /// Outputs of a launch. Waits for a GPU.
    pub fn outputs(&self, exec: &Exec, launch: &Launch) -> Result<Vec<Output>, OpError> {
        let mut outputs = (self.family.outputs)(exec, self, launch)?;
        if self.fp8.is_some() {
            // A rounding to FP8 differs by at most one code.
            let raised = |tolerance: f64| (tolerance * FP8_ROUNDINGS).min(1.0 / 8.0).max(tolerance);
            outputs.iter_mut().for_each(|output| output.tolerance = raised(output.tolerance));
        }
        Ok(outputs)
    }

    /// Error for an op whose record has unexpected operands.
    pub fn unknown(&self) -> OpError {
        OpError { op: self.record.op, message: "its record has unexpected operands".to_owned() }
    }
}

/// All outputs.
pub(super) fn all_written(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    launch.written.iter().map(|tensor| operands::output(exec, tensor, call.case)).collect()
}
