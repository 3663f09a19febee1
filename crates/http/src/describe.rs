//! The description of the interface, in OpenAPI 3.1.

use crate::endpoint::Endpoint;
use crate::given::{Named, reference};
use crate::problem::Problem;
use crate::serve::Access;
use crate::table;
use crate::words::Name;
use axum::http::Method;
use holdfast_api::{Capacity, Finding, Health};
use utoipa::openapi::path::{HttpMethod, Operation, OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, ObjectBuilder, OpenApi, OpenApiBuilder, OpenApiVersion, PathItem,
    PathsBuilder, Ref, RefOr, Required, ResponseBuilder, Schema, Type,
};

const JSON: &str = "application/json";

/// The grid as a whole; no request of the table.
pub const HEALTH: &str = "/v1/health";
pub const EVENTS: &str = "/v1/events";
pub const CAPACITY: &str = "/v1/capacity";
pub const ACCESS: &str = "/v1/access";

const ABOUT: &str = "Resources of a Holdfast grid, as a host has them. Errors have a code that programs go by; it stays \
    when texts change. Changes take the header Idempotency-Key: with the same key the same request is carried out once.";

/// Of any request, beside what it answers when all is well.
const PROBLEMS: [(&str, &str); 13] = [
    ("400", "what was asked for makes no sense"),
    ("401", "over the network: neither a certificate nor a token that is good was shown"),
    ("403", "who asks may not do that"),
    ("404", "there is no such thing"),
    ("408", "the body did not come within its time"),
    ("409", "something hangs on it, or it is in another state: the code and the text say which"),
    ("413", "the body is too large"),
    ("415", "the body is no JSON"),
    ("422", "the key was that of another request"),
    ("500", "it failed"),
    ("501", "hosts of an earlier release take part"),
    ("503", "who has to take part can't be reached, or it takes longer; ask again"),
    ("507", "there is not enough room"),
];

/// The description, as a text: docs/reference/openapi.json.
pub fn described() -> String {
    describe().to_pretty_json().expect("our description always encodes") + "\n"
}

/// What [`table::all`] has.
fn describe() -> OpenApi {
    let (mut schemas, mut paths) = (Vec::new(), PathsBuilder::new());
    for endpoint in table::all() {
        let operation = operation(&endpoint, &mut schemas);
        paths = paths.path(endpoint.path, PathItem::new(method(&endpoint.method), operation));
    }
    for (path, operation) in wholes(&mut schemas) {
        paths = paths.path(path, PathItem::new(HttpMethod::Get, operation));
    }
    let problem = reference::<Problem>(&mut schemas);
    schemas.sort_by(|(a, _), (b, _)| a.cmp(b));
    schemas.dedup_by(|(a, of_a), (b, of_b)| {
        assert!(a != b || of_a == of_b, "two shapes are called {a}");
        a == b
    });
    let refusal = |(status, about)| {
        let response = ResponseBuilder::new().description(about).content(JSON, json(problem.clone()));
        (refusal_of(status), response.build())
    };
    let components = ComponentsBuilder::new().schemas_from_iter(schemas);
    let components = components.responses_from_iter(PROBLEMS.map(refusal)).build();
    let info = InfoBuilder::new().title("Holdfast").version(env!("CARGO_PKG_VERSION")).description(Some(ABOUT));
    OpenApiBuilder::new()
        .openapi(OpenApiVersion::Version31)
        .info(info.build())
        .paths(paths.build())
        .components(Some(components))
        .build()
}

fn method(method: &Method) -> HttpMethod {
    match *method {
        Method::POST => HttpMethod::Post,
        Method::PUT => HttpMethod::Put,
        Method::PATCH => HttpMethod::Patch,
        Method::DELETE => HttpMethod::Delete,
        _ => HttpMethod::Get,
    }
}

fn refusal_of(status: &str) -> String {
    format!("Problem{status}")
}

/// `delete_volumes_volume`
fn id_of(endpoint: &Endpoint) -> String {
    let parts = endpoint.path.split('/').skip(2).map(|part| part.trim_matches(['{', '}']).replace('-', "_"));
    let words: Vec<String> = std::iter::once(endpoint.method.as_str().to_lowercase()).chain(parts).collect();
    words.join("_")
}

fn json(schema: RefOr<Schema>) -> utoipa::openapi::Content {
    ContentBuilder::new().schema(Some(schema)).build()
}

/// What is told of the grid as a whole.
fn wholes(schemas: &mut Vec<Named>) -> [(&'static str, Operation); 4] {
    let health = json(reference::<Health>(schemas));
    let capacity = json(reference::<Capacity>(schemas));
    let access = json(reference::<Access>(schemas));
    let finding = reference::<Finding>(schemas);
    let of = |id: &str, summary: &str, about: &str, (media, content)| {
        let answer = ResponseBuilder::new().description(about).content(media, content).build();
        let operation = OperationBuilder::new().operation_id(Some(id)).summary(Some(summary)).tag("health");
        with_problems(operation.response("200", answer)).build()
    };
    let about = "Server-sent events: `findings`, an array, once; then `raised` and `cleared`, one finding each";
    let text = ContentBuilder::new().schema(Some(finding)).build();
    [
        (ACCESS, of("get_access", "What who asks may do", "it is so", (JSON, access))),
        (
            CAPACITY,
            of(
                "get_capacity",
                "Where each byte of the grid is, as `holdfast space` has it",
                "it is so",
                (JSON, capacity),
            ),
        ),
        (
            HEALTH,
            of("get_health", "The grid as `holdfast status` has it, and what is not well", "it is so", (JSON, health)),
        ),
        (EVENTS, of("get_events", "What is not well, as it comes and goes", about, ("text/event-stream", text))),
    ]
}

fn with_problems(operation: OperationBuilder) -> OperationBuilder {
    let with = |operation: OperationBuilder, (status, _): (&str, &str)| {
        operation.response(status, Ref::from_response_name(refusal_of(status)))
    };
    PROBLEMS.into_iter().fold(operation, with)
}

/// What a part of a path can be.
fn part(name: &str, schemas: &mut Vec<Named>) -> RefOr<Schema> {
    let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0)).maximum(Some(u32::MAX));
    let id =
        ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"));
    match name {
        "node" | "filter" => number.into(),
        "device" => id.into(),
        _ => reference::<Name>(schemas),
    }
}

fn operation(endpoint: &Endpoint, schemas: &mut Vec<Named>) -> Operation {
    let text = || ObjectBuilder::new().schema_type(Type::String);
    let mut operation =
        OperationBuilder::new().operation_id(Some(id_of(endpoint))).summary(Some(endpoint.summary)).tag(endpoint.tag());
    for name in endpoint.names() {
        let parameter = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Path).required(Required::True);
        operation = operation.parameter(parameter.schema(Some(part(name, schemas))));
    }
    operation = (endpoint.parameters)().into_iter().fold(operation, OperationBuilder::parameter);
    if endpoint.method != Method::GET {
        let key = ParameterBuilder::new().name(crate::serve::KEY).parameter_in(ParameterIn::Header);
        let shape =
            text().min_length(Some(1)).max_length(Some(crate::retries::KEY_BYTES_MAX)).pattern(Some("^[!-~]+$"));
        let about = "The same key with the same request: it is carried out once";
        operation =
            operation.parameter(key.required(Required::False).description(Some(about)).schema(Some(shape.build())));
    }
    if let Some(schema) = (endpoint.body)(schemas) {
        let body = RequestBodyBuilder::new().content(JSON, json(schema)).required(Some(Required::True));
        operation = operation.request_body(Some(body.build()));
    }
    let mut answer = ResponseBuilder::new().description("it is so");
    if let Some(schema) = (endpoint.answer)(schemas) {
        answer = answer.content(JSON, json(schema));
    }
    with_problems(operation.response(endpoint.status.as_str(), answer.build())).build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_page_of_programs_is_what_the_table_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/openapi.json");
        let is_same = std::fs::read_to_string(path).unwrap_or_default() == described();
        assert!(is_same, "it is stale: `holdfast reference --http >docs/reference/openapi.json` writes it anew");
    }

    #[test]
    fn what_is_refused_whatever_is_there_is_described() {
        let all: serde_json::Value = serde_json::from_str(&described()).unwrap();
        let said = |schema: &str, path: &str| all["components"]["schemas"][schema].pointer(path).cloned();
        let volumes = ["minItems", "maxItems", "uniqueItems"];
        let volumes = volumes.map(|limit| said("SnapshotGroupBody", &format!("/properties/volumes/{limit}")).unwrap());
        assert_eq!(serde_json::Value::from(volumes.to_vec()), serde_json::json!([1, 1024, true]));
        for word in ["Name", "Layout", "Span", "Keep", "FirstTierSize", "KeyFile", "Qos", "FilterSpec"] {
            let pattern = said(word, "/pattern").or_else(|| said(word, "/anyOf/1/pattern"));
            assert!(pattern.is_some_and(|pattern| pattern.as_str().is_some_and(|p| p.starts_with('^'))), "{word}");
        }
        assert_eq!(said("VolumeBytes", "/multipleOf"), Some(4096.into()));
        assert_eq!(said("VolumeInfo", "/properties/epoch/format"), Some("uint64".into()));
        let cut = &all["paths"]["/v1/nodes/{node}/cut"]["post"];
        assert_eq!(cut["parameters"][0]["schema"]["type"], "integer");
        assert!(cut["responses"]["422"].is_object());
    }

    #[test]
    fn all_that_is_referred_to_is_there_and_all_of_the_table_is_described() {
        let text = described();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(all["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")), "{}", all["openapi"]);
        let referred = text.split("#/components/").skip(1).filter_map(|rest| rest.split('"').next());
        for name in referred.collect::<BTreeSet<_>>() {
            assert!(all.pointer(&format!("/components/{name}")).is_some(), "there is no {name}");
        }
        for endpoint in table::all() {
            let described = &all["paths"][endpoint.path][endpoint.method.as_str().to_lowercase()];
            assert_eq!(described["summary"], endpoint.summary, "{} {}", endpoint.method, endpoint.path);
        }
    }
}
