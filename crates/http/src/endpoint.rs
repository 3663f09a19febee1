//! One entry of the table of what can be asked for.

use crate::answer::Answer;
use crate::given::{Body, Named, Path, Query};
use axum::http::{Method, StatusCode};
use holdfast_api::{Code, Error, Request, Response};
use serde_json::Value;
use utoipa::openapi::path::Parameter;
use utoipa::openapi::{RefOr, Schema};

type Build = Box<dyn Fn(&Path, &str, &[u8]) -> Result<Request, Error> + Send + Sync>;

/// What can be asked for at one path by one method.
pub struct Endpoint {
    pub method: Method,
    /// `/v1/volumes/{volume}`
    pub path: &'static str,
    pub summary: &'static str,
    pub status: StatusCode,
    pub takes_json: bool,
    build: Build,
    show: fn(Response) -> Result<Option<Value>, Error>,
    pub parameters: fn() -> Vec<Parameter>,
    pub body: fn(&mut Vec<Named>) -> Option<RefOr<Schema>>,
    pub answer: fn(&mut Vec<Named>) -> Option<RefOr<Schema>>,
}

impl Endpoint {
    pub fn new<Q: Query, B: Body, A: Answer>(
        method: Method,
        path: &'static str,
        summary: &'static str,
        build: impl Fn(&Path, Q, B) -> Result<Request, Error> + Send + Sync + 'static,
    ) -> Endpoint {
        Endpoint {
            method,
            path,
            summary,
            status: A::STATUS,
            takes_json: B::IS_JSON,
            build: Box::new(move |path, query, body| build(path, Q::read(query)?, B::read(body)?)),
            show: show::<A>,
            parameters: Q::parameters,
            body: B::schema,
            answer: A::schema,
        }
    }

    /// # Errors
    /// What was given makes no request.
    pub fn request(&self, path: &Path, query: &str, body: &[u8]) -> Result<Request, Error> {
        (self.build)(path, query, body)
    }

    /// The body of the answer, if it has any.
    ///
    /// # Errors
    /// The host refused or failed, or answered something else.
    pub fn show(&self, response: Response) -> Result<Option<Value>, Error> {
        (self.show)(response)
    }

    /// Parts of the path that stand for something, in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    }

    /// What it is about: the first part of its path.
    pub fn tag(&self) -> &'static str {
        self.path.split('/').nth(2).unwrap_or_default()
    }
}

fn show<A: Answer>(response: Response) -> Result<Option<Value>, Error> {
    if let Response::Error { message, code } = response {
        return Err(Error::new(code, message));
    }
    let fits = A::of(response).map(A::show);
    fits.ok_or_else(|| Error::new(Code::Failed, "the host's answer does not fit the request: is it another release?"))
}
