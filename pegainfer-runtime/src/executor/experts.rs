//! Counting of the experts of some steps.

use super::Executor;
use crate::expert_readback::ExpertReadback;
use crate::model::Model;
use pegainfer_core::tensor::OpError;

impl<M: Model> Executor<M> {
    /// Counts the experts of later steps of up to `tokens` tokens, see `Outcome::experts`. No effect on a model without
    /// experts.
    pub fn count_experts(&mut self, tokens: usize) -> std::io::Result<()> {
        let shape = M::expert_layers(&self.config).filter(|shape| shape.layers > 0);
        self.experts = shape.map(|shape| ExpertReadback::new(self.exec(), shape, tokens)).transpose()?;
        Ok(())
    }

    /// Starts counting the experts of the step of `tokens` tokens that was sampled last, if it is a counted one.
    pub(super) fn start_counting(&mut self, tokens: usize) -> Result<(), OpError> {
        let Some(experts) = &mut self.experts else { return Ok(()) };
        let Some(layer) = experts.next_step() else { return Ok(()) };
        match self.ranks.first_mut().chosen_experts(layer, tokens) {
            Some((exec, chosen)) => experts.start(exec, layer, chosen),
            None => Ok(()),
        }
    }
}
