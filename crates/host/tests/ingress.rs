//! What a forwarding host does with requests that came long before their session began.

use holdfast_base::{
    BlockOp, BlockRequest, ByteRange, Effects, GridId, InstanceId, Instant, RequestToken, Token, VolumeId,
};
use holdfast_format::forward::Client;
use holdfast_host::forward::{Ingress, IngressEffect, IngressEvent, LAPSE, Route};
use std::time::Duration;

const SESSION: Token = Token(4);
const VOLUME: VolumeId = VolumeId(9);

/// Of a session that begins at `now` where its volume is served here: what follows from a request that came at `since`.
fn begun_late(route: Route, now: Instant, since: Instant) -> Vec<IngressEffect> {
    let mut ingress = Ingress::new(GridId(7), "ingress", InstanceId(1));
    let mut out = Effects::new();
    let (session, volume, export) = (SESSION, VOLUME, "vm".to_string());
    let request = BlockRequest { token: RequestToken(1), op: BlockOp::Read(ByteRange { offset: 0, len: 512 }) };
    ingress.handle(now, IngressEvent::Route { volume, route }, &mut out);
    ingress.handle(
        now,
        IngressEvent::Open { session, volume, export, client: Client::default(), wrote_at: None },
        &mut out,
    );
    ingress.handle(now, IngressEvent::Request { session, request, since }, &mut out);
    // An owner appears, if there was none, and then the session's time is up.
    ingress.handle(now, IngressEvent::Route { volume, route: Route::Here }, &mut out);
    ingress.handle(now + LAPSE, IngressEvent::Tick, &mut out);
    out.take()
}

#[test]
fn a_request_that_is_too_old_ends_its_session_wherever_the_volume_is() {
    let now = Instant(60_000_000_000);
    let young = Instant(now.0 - (LAPSE - Duration::from_millis(1)).as_nanos() as u64);
    let old = Instant(now.0 - LAPSE.as_nanos() as u64);
    for route in [Route::Here, Route::Nowhere] {
        let effects = begun_late(route, now, young);
        let [IngressEffect::Submit { since, .. }, ..] = effects[..] else { panic!("{route:?}: {effects:?}") };
        assert_eq!(since, young, "it is as old as it was");
        let effects = begun_late(route, now, old);
        assert!(matches!(effects[..], [IngressEffect::Abort { session: SESSION }]), "{route:?}: {effects:?}");
    }
}

#[test]
fn an_ingress_without_sessions_knows_that_it_did_not_stand_still() {
    let mut ingress = Ingress::new(GridId(7), "ingress", InstanceId(1));
    let mut out = Effects::new();
    let mut now = Instant(5_000_000_000);
    ingress.handle(now, IngressEvent::Route { volume: VOLUME, route: Route::Here }, &mut out);
    for _ in 0..30 {
        now = ingress.next_deadline().expect("it is looked at again");
        ingress.handle(now, IngressEvent::Tick, &mut out);
    }
    // A volume with clients that have worked here for long is offered by others, too.
    let since = ingress.since(now + Duration::from_secs(1));
    assert!(now.since(since) < LAPSE / 2, "what comes now was not sent {:?} ago", now.since(since));
    let (session, volume, export) = (SESSION, VOLUME, "vm".to_string());
    let open = IngressEvent::Open { session, volume, export, client: Client::default(), wrote_at: None };
    ingress.handle(now, open, &mut out);
    let request = BlockRequest { token: RequestToken(1), op: BlockOp::Read(ByteRange { offset: 0, len: 512 }) };
    ingress.handle(now, IngressEvent::Request { session, request, since }, &mut out);
    assert!(matches!(out.take()[..], [IngressEffect::Submit { .. }]));
}
