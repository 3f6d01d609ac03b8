//! The deadline of a request: from its head to the head of its response, whatever the server does in between.

use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::lifecycle::Deadline;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use pegainfer_terminal::values::parse_seconds;
use std::time::Duration;

/// Header with the client's own time limit in seconds.
const HEADER: &str = "x-request-timeout";
/// Header with the time limit of a gRPC call: at most eight digits and a unit.
const GRPC_HEADER: &str = "grpc-timeout";

/// Middleware: 504 when the time limit of the server or the client passes before the response begins, which drops the work
/// for it. The deadline goes with the request, for the part of the work that the response continues.
pub async fn enforce(
    limit: Option<Duration>,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let style = ApiStyle::of(request.extensions());
    let deadline = match of(request.headers(), style, limit) {
        Ok(Some(deadline)) => deadline,
        Ok(None) => return next(request).await,
        Err(error) => return error.into_response(),
    };
    request.extensions_mut().insert(deadline);
    tokio::select! {
        biased;
        response = next(request) => response,
        () = tokio::time::sleep_until(deadline.at.into()) => deadline.error().into_response(),
    }
}

/// The server's time limit, or the client's if that is shorter.
fn of(headers: &HeaderMap, style: ApiStyle, limit: Option<Duration>) -> Result<Option<Deadline>, ApiError> {
    let of_call = headers.get(GRPC_HEADER).filter(|_| style == ApiStyle::Grpc);
    let of_call = of_call.map(|value| grpc_timeout(value.to_str().unwrap_or_default())).transpose()?;
    let asked = match headers.get(HEADER) {
        None => None,
        Some(value) => {
            let seconds = parse_seconds(value.to_str().unwrap_or_default());
            Some(seconds.map_err(|e| ApiError::invalid(HEADER, format!("{HEADER}: {e}")))?)
        }
    };
    Ok(asked.into_iter().chain(of_call).chain(limit).min().map(Deadline::after))
}

/// A duration such as `250m`: units are `H`, `M`, `S`, `m` (ms), `u` (µs) and `n` (ns).
fn grpc_timeout(text: &str) -> Result<Duration, ApiError> {
    let parsed = text.split_at_checked(text.len().saturating_sub(1)).and_then(|(digits, unit)| {
        let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        let n: u64 = digits.parse().ok().filter(|_| is_number)?;
        Some(match unit {
            "H" => Duration::from_secs(3600 * n),
            "M" => Duration::from_secs(60 * n),
            "S" => Duration::from_secs(n),
            "m" => Duration::from_millis(n),
            "u" => Duration::from_micros(n),
            "n" => Duration::from_nanos(n),
            _ => return None,
        })
    });
    let message = || format!("{GRPC_HEADER} is at most eight digits and one of H, M, S, m, u and n, such as 250m");
    parsed.ok_or_else(|| ApiError::invalid(GRPC_HEADER, message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_calls_have_units() {
        for (text, seconds) in [("1H", 3600.0), ("2M", 120.0), ("5S", 5.0), ("250m", 0.25), ("8u", 8e-6), ("3n", 3e-9)]
        {
            assert_eq!(grpc_timeout(text).unwrap().as_secs_f64(), seconds, "{text}");
        }
        assert_eq!(grpc_timeout("99999999H").unwrap().as_secs(), 359_999_996_400);
        for bad in ["", "S", "1", "1s", "-1S", "+1S", "123456789S", "1é", "1.5S", " 1S"] {
            assert!(grpc_timeout(bad).is_err(), "{bad}");
        }
    }
}
