//! The dashboard: files that a browser shows the grid with. They are for everybody who reaches the host; what they ask
//! for is not.

use axum::Router;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Nothing comes from elsewhere, nothing goes elsewhere, and no page of another site has it in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const GUARDS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

macro_rules! files {
    ($($path:literal => $file:literal, $media:literal;)*) => {
        [$(File { path: $path, media: $media, text: include_str!(concat!("../web/", $file)) },)*]
    };
}

#[derive(Clone, Copy)]
struct File {
    path: &'static str,
    media: &'static str,
    text: &'static str,
}

const FILES: [File; 18] = files! {
    "/" => "index.html", "text/html; charset=utf-8";
    "/web/icon.svg" => "icon.svg", "image/svg+xml";
    "/web/style.css" => "style.css", "text/css; charset=utf-8";
    "/web/main.js" => "main.js", "text/javascript; charset=utf-8";
    "/web/ask.js" => "ask.js", "text/javascript; charset=utf-8";
    "/web/store.js" => "store.js", "text/javascript; charset=utf-8";
    "/web/words.js" => "words.js", "text/javascript; charset=utf-8";
    "/web/parts.js" => "parts.js", "text/javascript; charset=utf-8";
    "/web/overview.js" => "overview.js", "text/javascript; charset=utf-8";
    "/web/space.js" => "space.js", "text/javascript; charset=utf-8";
    "/web/volumes.js" => "volumes.js", "text/javascript; charset=utf-8";
    "/web/volume.js" => "volume.js", "text/javascript; charset=utf-8";
    "/web/machines.js" => "machines.js", "text/javascript; charset=utf-8";
    "/web/actions.js" => "actions.js", "text/javascript; charset=utf-8";
    "/web/chart.js" => "chart.js", "text/javascript; charset=utf-8";
    "/web/vendor/preact.js" => "vendor/preact.js", "text/javascript; charset=utf-8";
    "/web/vendor/uplot.js" => "vendor/uplot.js", "text/javascript; charset=utf-8";
    "/web/vendor/uplot.css" => "vendor/uplot.css", "text/css; charset=utf-8";
};

/// A route for each file.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.into_iter().fold(Router::new(), |router, file| {
        let tag = tag_of(file.text);
        router.route(file.path, get(move |headers: HeaderMap| async move { answer(file, &tag, &headers) }))
    })
}

/// By which a browser knows whether it has this release's.
fn tag_of(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

fn answer(file: File, tag: &str, headers: &HeaderMap) -> Response {
    let has_it = headers.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = match has_it {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => ([(header::CONTENT_TYPE, file.media)], file.text).into_response(),
    };
    let into = response.headers_mut();
    into.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    into.insert(header::ETAG, tag.parse().expect("a hash is a header's value"));
    into.extend(GUARDS.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_file_of_the_dashboard_is_served_and_no_other() {
        let of = |dir: &str| {
            let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("web").join(dir);
            let names = dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let is_web = |name: &String| [".js", ".css", ".svg"].iter().any(|end| name.ends_with(end));
            names.filter(is_web).collect::<Vec<_>>()
        };
        let there = of("").into_iter().map(|name| format!("/web/{name}"));
        let there = there.chain(of("vendor").into_iter().map(|name| format!("/web/vendor/{name}")));
        let there: BTreeSet<String> = there.chain(["/".to_string()]).collect();
        let served: BTreeSet<String> = FILES.iter().map(|file| file.path.to_string()).collect();
        assert_eq!(there, served);
    }

    #[test]
    fn nothing_of_it_names_another_host() {
        for file in FILES.iter().filter(|file| !file.path.contains("/vendor/")) {
            // A name of a kind of document, which is fetched from nowhere.
            let text = file.text.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains("http://") && !text.contains("https://"), "{}", file.path);
        }
    }
}
