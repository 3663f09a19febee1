//! Refusals and failures, as HTTP has them: a status by the code, and the same object as of `holdfast --json`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use holdfast_api::{Code, Error};
use serde::Serialize;
use utoipa::ToSchema;

/// Seconds after which the same request may succeed.
const AGAIN_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Why something was not done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, ToSchema)]
pub struct Problem {
    pub error: ProblemError,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, ToSchema)]
pub struct ProblemError {
    /// What kind of thing stood in the way: programs go by this.
    pub code: Code,
    /// What, why, and what to do next: for people.
    pub message: String,
}

impl From<Error> for Problem {
    fn from(Error { code, message }: Error) -> Problem {
        Problem { error: ProblemError { code, message } }
    }
}

/// RFC 9110, section 15; 507 of RFC 4918, section 11.5.
pub fn status_of(code: Code) -> StatusCode {
    match code {
        Code::Invalid => StatusCode::BAD_REQUEST,
        Code::NotPermitted => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Exists | Code::InUse | Code::State | Code::Protected | Code::Redundancy | Code::Changed => {
            StatusCode::CONFLICT
        }
        Code::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Code::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The same request may succeed without anything being done.
pub fn passes(code: Code) -> bool {
    matches!(code, Code::Changed | Code::Unavailable)
}

/// Says when the same request may succeed.
pub fn ask_again(mut response: Response) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, AGAIN_AFTER);
    response
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let code = self.error.code;
        let response = (status_of(code), Json(self)).into_response();
        if passes(code) { ask_again(response) } else { response }
    }
}
