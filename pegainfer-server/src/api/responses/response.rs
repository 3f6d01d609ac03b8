//! Response of `/v1/responses`, whole or streamed.

use super::output::ResponseOutput;
use super::wire::{InputDetails, OutputDetails, ResponseUsage};
use crate::api::blocks;
use crate::api::delta::{Counts, Delta};
use crate::api::generation::Generation;
use crate::api::large_response::{GrowingResponse, json_bytes};
use crate::api::sse::{ChunkWriter, Events};
use crate::api::state::AppState;
use crate::api::submitted_chat::ChoiceParser;
use crate::api::timings::Timings;
use crate::api::wire::Usage;
use crate::error::ApiError;
use axum::response::Response;

fn counts(usage: &Usage, reasoning_tokens: usize) -> ResponseUsage {
    ResponseUsage {
        input_tokens: usage.prompt_tokens,
        input_tokens_details: InputDetails { cached_tokens: usage.cached_tokens() },
        output_tokens: usage.completion_tokens,
        output_tokens_details: OutputDetails { reasoning_tokens },
        total_tokens: usage.total_tokens,
    }
}

/// Writes a response as its tokens arrive.
pub struct ResponseWriter {
    parser: ChoiceParser,
    output: ResponseOutput,
}

impl ResponseWriter {
    /// A writer at the start of the response.
    pub fn new(parser: ChoiceParser, output: ResponseOutput) -> Self {
        Self { parser, output }
    }

    /// Waits for the end of the generation and responds with the whole response. `repeated` is the maximum number of
    /// bytes that repeat the request.
    pub async fn respond(
        self,
        generation: &mut Generation,
        repeated: usize,
        state: &AppState,
    ) -> Result<Response, ApiError> {
        let (Self { mut parser, mut output }, growing) = (self, GrowingResponse::new(generation.tenant()));
        growing.add_bytes(repeated as u64, state)?;
        let finish = blocks::collect(generation, &mut parser, &growing, state, |events| output.push(events)).await?;
        output.end(finish);
        let usage = counts(&Usage::sum([generation.counts()], 1), parser.reasoning_tokens);
        growing.respond(state, move || json_bytes(&output.whole(usage))).await
    }
}

impl ChunkWriter for ResponseWriter {
    fn begin(&mut self, out: &mut Events, _: Usage) {
        self.output.begin(out);
    }

    fn delta(&mut self, out: &mut Events, _: usize, mut delta: Delta, _: Counts) {
        self.output.begin(out);
        self.output.write(out, self.parser.parse(&mut delta));
        self.output.set_finish(delta.finish);
    }

    fn finish(&mut self, out: &mut Events, usage: Usage, _: Option<Timings>) {
        self.output.write_end(out, counts(&usage, self.parser.reasoning_tokens));
    }

    fn error(&mut self, out: &mut Events, error: &ApiError) {
        self.output.write_error(out, error);
    }

    fn end(&mut self, _: &mut Events) {}
}
