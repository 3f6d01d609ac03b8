//! One request of a batch.

use super::output::{Failure, ID_PREFIX, Response, ResultLine};
use crate::cli::local_server::LocalServer;
use crate::ids;
use anyhow::{Context, Result};
use axum::body::to_bytes;
use axum::response::Response as HttpResponse;
use serde_json::value::RawValue;

/// Sends a request and waits for its response. Errors of the API are responses.
pub(super) async fn run(server: LocalServer, custom_id: String, url: String, body: Vec<u8>) -> Result<ResultLine> {
    let id = || Some(format!("{ID_PREFIX}{:016x}{:016x}", ids::random_u64().ok()?, ids::random_u64().ok()?));
    let id = id().context("the operating system gives no random numbers")?;
    let response = read(server.post(&url, body).await?).await;
    Ok(match response {
        Ok(response) => ResultLine { id, custom_id, response: Some(response), error: None },
        Err(error) => {
            let error = Failure { code: "server_error", message: format!("{error:#}") };
            ResultLine { id, custom_id, response: None, error: Some(error) }
        }
    })
}

async fn read(response: HttpResponse) -> Result<Response> {
    let request_id = response.headers().get(ids::HEADER).and_then(|id| id.to_str().ok());
    let (status_code, request_id) = (response.status().as_u16(), request_id.unwrap_or_default().to_owned());
    // The API itself limits the size of responses.
    let bytes = to_bytes(response.into_body(), usize::MAX).await.context("the response broke off")?;
    let text = String::from_utf8(bytes.into()).context("the response is not UTF-8")?;
    // A result is one line. Line breaks in JSON are only white space.
    let body = RawValue::from_string(text.replace('\n', " ")).context("the response is not JSON")?;
    Ok(Response { status_code, request_id, body })
}
