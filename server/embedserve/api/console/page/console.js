// Polls the server every two seconds while the page is visible, and updates each section.

import { ask, askText, hasToken, RequestError, useToken } from "./server.js";
import { Between, Reading } from "./metrics.js";
import { addPoints, showFigures } from "./figures.js";
import { showModels, showPlans } from "./models.js";
import { showLookups, showSlow, showUnknown } from "./traffic.js";
import { offerModels, startAgain, startForm, wasDenied } from "./form.js";
import { byId, clock, say } from "./page.js";

const POLL_MS = 2000;
const WINDOW_MS = 10000;

let readings = []; // metrics of the last seconds, oldest first
let lastResponse = null;
let timer = null;
let isAsking = false;

function poll() {
  clearTimeout(timer);
  if (document.hidden || isAsking) return;
  isAsking = true;
  refresh()
    .then(() => {
      lastResponse = new Date();
      showState("good", `Live, every ${POLL_MS / 1000} s`);
    }, showFailure)
    .finally(() => {
      isAsking = false;
      timer = setTimeout(poll, POLL_MS);
    });
}

/** Fetches everything once, and shows it. */
async function refresh() {
  const { models, default_model: defaultModel } = await ask("models");
  const errors = [];
  const between = await readMetrics().catch(addTo(errors));
  showModels(models, defaultModel, between);
  await Promise.all([showPlans(models), offerModels(models)]);
  byId("access").hidden = !wasDenied(); // lookups may need a token where the figures need none
  byId("links").hidden = hasToken(); // a browser that follows a link sends no token
  if (between) {
    showFigures(between);
    showLookups(models, between);
    showUnknown(models, between);
    await showServer().catch(addTo(errors));
  }
  if (errors.length) throw errors[0];
}

/** Returns an error handler that records the error, so that the other responses are shown first. */
function addTo(errors) {
  return (error) => {
    errors.push(error);
    return null;
  };
}

/** Returns the change of the metrics over the last seconds; null at the first reading. */
async function readMetrics() {
  const now = new Reading(await askText("metrics"), performance.now());
  const last = readings.at(-1);
  if (last) addPoints(new Between(last, now));
  readings.push(now);
  while (readings.length > 2 && now.atMs - readings[0].atMs >= WINDOW_MS + POLL_MS) readings.shift();
  return readings.length > 1 ? new Between(readings[0], now) : null;
}

/** Shows how the server runs, and its slowest requests. */
async function showServer() {
  const info = await ask("info");
  const workers = info.workers === 1 ? "1 worker" : `${info.workers} workers`;
  say("server", `${location.host}, embedserve ${info.version}, ${workers}, tables ${info.tables}`);
  showSlow(await ask("slow"));
}

function showFailure(error) {
  if (!(error instanceof RequestError)) {
    showState("bad", `This page failed: ${error.message}`);
    throw error;
  }
  if (error.isDenied) askForToken(error);
  if (lacksToken(error)) {
    showState("paused", "Asks for a token");
    return;
  }
  const old = lastResponse ? `; the figures are of ${clock(lastResponse)}` : "";
  showState("bad", `${error.message}${old}`);
}

function lacksToken(error) {
  return error.status === 401 && !hasToken();
}

function askForToken(error) {
  const form = byId("access");
  say("access-why", lacksToken(error) ? "" : error.message);
  if (!form.hidden) return;
  form.hidden = false;
  if (document.activeElement === document.body) byId("token").focus();
}

function showState(kind, text) {
  byId("state").className = kind;
  say("state", text);
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(byId("token").value.trim());
  byId("token").value = "";
  startAgain();
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    showState("paused", "Paused while nobody looks");
    readings = [];
  }
  poll();
});
startForm((error) => {
  askForToken(error);
  byId("token").focus();
});
poll();
