//! Collects the whole output of a choice.

use super::Generation;
use crate::api::delta::ChoiceOutput;
use crate::api::large_response::GrowingResponse;
use crate::api::state::AppState;
use crate::error::ApiError;

impl Generation {
    /// Waits for the end of the choice. `keeps_tokens`: the response shows more of the tokens than their text.
    pub async fn collect(
        &mut self,
        keeps_tokens: bool,
        growing: &GrowingResponse,
        state: &AppState,
    ) -> Result<ChoiceOutput, ApiError> {
        let mut output = ChoiceOutput::default();
        while let Some(delta) = self.next().await {
            let delta = delta?;
            growing.add(&delta, state)?;
            output.push(delta, keeps_tokens);
        }
        Ok(output)
    }
}
