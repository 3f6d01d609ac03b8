//! A blocking gRPC client, made of the client of the crate `vllm-proto`.

use std::net::SocketAddr;
use tokio::runtime::Runtime;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use vllm_proto::control_client::ControlClient;
use vllm_proto::generate_request::Prompt;
use vllm_proto::inference_client::InferenceClient;
use vllm_proto::{FinishInfo, GenerateRequest, GenerateResponse, ResponseOptions, StoppingCriteria, TokenIds};

/// A client with one connection.
pub struct Client {
    pub runtime: Runtime,
    pub inference: InferenceClient<Channel>,
    pub control: ControlClient<Channel>,
    metadata: Vec<(&'static str, String)>,
}

/// The joined output of one sequence of a stream.
#[derive(Debug, Default, PartialEq)]
pub struct Sequence {
    pub text: String,
    pub ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub finish: Option<FinishInfo>,
}

impl Client {
    /// A connected client.
    pub fn connect(address: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // A small window: streams that are not read stop soon.
        let endpoint = Channel::from_shared(format!("http://{address}")).unwrap().initial_stream_window_size(1 << 16);
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        let (inference, control) = (InferenceClient::new(channel.clone()), ControlClient::new(channel));
        Self { runtime, inference, control, metadata: vec![] }
    }

    /// The client with metadata in each call.
    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.metadata.push((name, value.into()));
        self
    }

    /// A client with an API key.
    pub fn with_key(address: SocketAddr, key: &str) -> Self {
        Self::connect(address).with("authorization", &format!("Bearer {key}"))
    }

    /// A call with the client's metadata.
    pub fn call<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        for (name, value) in &self.metadata {
            request.metadata_mut().insert(*name, MetadataValue::try_from(value.as_str()).unwrap());
        }
        request
    }

    /// Calls `Generate`.
    pub fn generate(&mut self, request: GenerateRequest) -> Result<GenerateResponse, Status> {
        let call = self.call(request);
        self.runtime.block_on(self.inference.generate(call)).map(|response| response.into_inner())
    }

    /// Calls `GenerateStream` and returns the stream.
    pub fn open(&mut self, request: GenerateRequest) -> Result<Streaming<GenerateResponse>, Status> {
        let call = self.call(request);
        self.runtime.block_on(self.inference.generate_stream(call)).map(|response| response.into_inner())
    }

    /// The next response of a stream; `None` at its end.
    pub fn next(&mut self, stream: &mut Streaming<GenerateResponse>) -> Result<Option<GenerateResponse>, Status> {
        self.runtime.block_on(stream.message())
    }

    /// All responses of a stream.
    pub fn stream(&mut self, request: GenerateRequest) -> Result<Vec<GenerateResponse>, Status> {
        let mut stream = self.open(request)?;
        let mut responses = vec![];
        while let Some(response) = self.next(&mut stream)? {
            responses.push(response);
        }
        Ok(responses)
    }
}

/// A greedy call for a text.
pub fn text(prompt: &str, max_new_tokens: u32) -> GenerateRequest {
    of(Prompt::Text(prompt.into()), max_new_tokens)
}

/// A greedy call for token ids.
pub fn ids(ids: &[u32], max_new_tokens: u32) -> GenerateRequest {
    of(Prompt::TokenIds(TokenIds { ids: ids.to_vec() }), max_new_tokens)
}

fn of(prompt: Prompt, max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(prompt),
        temperature: Some(0.0),
        stopping: Some(StoppingCriteria { max_new_tokens, ignore_eos: true, ..Default::default() }),
        response: Some(ResponseOptions { output_token_ids: true, output_logprobs: true, ..Default::default() }),
        ..Default::default()
    }
}

/// Joins the responses of a stream: number of prompt tokens, and the sequences.
pub fn join(responses: &[GenerateResponse]) -> (u32, Vec<Sequence>) {
    let first = responses.first().unwrap().prompt_info.as_ref().expect("the first response has the prompt");
    assert!(responses[1..].iter().all(|response| response.prompt_info.is_none()));
    let mut sequences: Vec<Sequence> = vec![];
    for output in responses.iter().filter_map(|response| response.outputs.as_ref()) {
        let index = output.index as usize;
        sequences.resize_with(sequences.len().max(index + 1), Sequence::default);
        let sequence = &mut sequences[index];
        assert!(sequence.finish.is_none(), "a sequence goes on after its end");
        sequence.text += &output.text;
        sequence.ids.extend(&output.token_ids);
        sequence.logprobs.extend(&output.logprobs);
        sequence.finish.clone_from(&output.finish_info);
    }
    (first.num_prompt_tokens, sequences)
}
